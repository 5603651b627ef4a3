"""What a target model looks like, from a Hugging Face config or GGUF metadata. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from adaflash.engine.errors import CheckpointError

Json = Mapping[str, object]


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class TabulatedScaling:
    """A divisor per frequency, as GGUF files store it."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | TabulatedScaling


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder of the Llama kind."""

    family: str  # "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama
NO_EXPERTS = "mixture-of-experts models are not supported; use a dense model"


class Fields:
    """Typed access to a JSON object; errors name the field."""

    def __init__(self, values: Json, what: str) -> None:
        self._values = values
        self._what = what

    def optional(self, name: str) -> object:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self._what}: {name} must be a whole number, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self._what}: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, default))

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._what} has no {name}")
        return value


def from_hf(config: Json, generation_config: Json) -> ModelConfig:
    """From config.json and generation_config.json (empty if there is none).

    Raises CheckpointError for anything that would be computed wrongly.
    """
    fields = Fields(config, "config.json")
    family = _family(config)
    _refuse_unsupported(config, fields, family)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", family == "qwen2")
    theta, scaling = _rope(config, fields.integer("max_position_embeddings", 2048))
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=True if family == "qwen2" else attention_bias,
        o_bias=False if family == "qwen2" else attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(generation_config.get("eos_token_id"))
        or _token_ids(config.get("eos_token_id")),
        bos_token_id=_optional_int(config.get("bos_token_id")),
    )


def from_gguf(metadata: Json, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """From a GGUF file's metadata (its scalars) and the shapes of its tensors, by GGUF names.

    Raises CheckpointError for anything that would be computed wrongly.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise CheckpointError(
            f"GGUF architecture {architecture!r} is not supported; these are: "
            f"{', '.join(GGUF_FAMILIES)}"
        )
    family = str(architecture)
    prefix = f"{family}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items()}
    fields = Fields(own, "the GGUF metadata")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError("rotating a part of each head is not supported")
    _refuse_unsupported_gguf(metadata, fields)
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the GGUF file has no token_embd.weight")
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(own, fields),
        max_position_embeddings=fields.integer("context_length"),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        # Chat models may end a turn with another token than a text.
        eos_token_ids=_token_ids(
            [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        ),
        bos_token_id=_optional_int(metadata.get("tokenizer.ggml.bos_token_id")),
    )


def _family(config: Json) -> str:
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in FAMILIES:
        raise CheckpointError(
            f"architecture {name!r} is not supported; these are: {', '.join(FAMILIES)}"
        )
    return FAMILIES[str(name)]


def _refuse_unsupported(config: Json, fields: Fields, family: str) -> None:
    """What the decoder would compute wrongly or not at all."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"activation {activation!r} is not supported; only 'silu' is")
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantised safetensors checkpoints (quantization_config) are not supported; use the "
            "unquantised model, or a GGUF file"
        )
    if config.get("num_experts") or config.get("num_local_experts"):
        raise CheckpointError(NO_EXPERTS)
    layer_types = config.get("layer_types")
    used = fields.flag("use_sliding_window", family == "mistral")
    if isinstance(layer_types, list):
        used = used or "sliding_attention" in layer_types
    window = config.get("sliding_window", 4096)  # transformers' default; null means none
    if used and window is not None:
        _refuse_window(window, fields.integer("max_position_embeddings", 2048))


def _refuse_unsupported_gguf(metadata: Json, fields: Fields) -> None:
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"this is one of {parts} parts of a GGUF model; join them with llama-gguf-split --merge"
        )
    if fields.integer("expert_count", 0):
        raise CheckpointError(NO_EXPERTS)
    if window := fields.integer("attention.sliding_window", 0):
        _refuse_window(window, fields.integer("context_length"))


def _refuse_window(window: object, positions: int) -> None:
    if not isinstance(window, int) or window < positions:
        raise CheckpointError(
            f"sliding-window attention ({window} of {positions} tokens) is not supported; "
            "use a model with full attention"
        )


def _rope(config: Json, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the older two keys."""
    both = config.get("rope_parameters")
    parameters = both if isinstance(both, dict) else config.get("rope_scaling")
    values: Json = parameters if isinstance(parameters, dict) else {}
    fields = Fields(values, "the rope parameters")
    top = Fields(config, "config.json")
    theta = fields.number("rope_theta", top.number("rope_theta", 10000.0))
    turned = fields.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    if turned != 1:
        raise CheckpointError(
            "rotating a part of each head (partial_rotary_factor) is not supported"
        )
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(fields.number("factor"))
    if kind == "llama3":
        original = fields.integer("original_max_position_embeddings", max_positions)
        return theta, Llama3Scaling(
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            original,
        )
    raise CheckpointError(
        f"RoPE scaling {kind!r} is not supported; 'linear' and 'llama3' are, or a model without "
        "scaling"
    )


def _gguf_scaling(own: Json, fields: Fields) -> RopeScaling | None:
    """Of the metadata; a `rope_freqs.weight` tensor is read with the weights."""
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    raise CheckpointError(
        f"RoPE scaling {kind!r} is not supported in GGUF files; 'linear' is, or a model without "
        "scaling"
    )


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int)))


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None
