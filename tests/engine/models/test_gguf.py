"""GGUF files: written here from tiny transformers models, and the default model's own."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaflash.engine.build import Models, assemble, size_cache
from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.config import EngineConfig
from adaflash.engine.devices import choose_device
from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.checkpoint import Checkpoint
from adaflash.engine.models.config import LinearScaling, from_gguf
from adaflash.engine.models.gguf_checkpoint import LAYER_NAMES, TOP_NAMES
from adaflash.engine.models.weights import decoder_from, load_decoder, open_checkpoint
from adaflash.engine.types import SamplingParams
from adaflash.kernels.reference_attention import ReferenceAttention
from adaflash.server.gguf_tokenizer import read_gguf_tokenizer
from adaflash.server.settings import default_cache_dir
from tests.engine.models.families import CPU, FAMILIES, VOCAB, PagedRun, randomize
from tests.engine.toy import request, run, text

GGUF_NAME = {ours: theirs for theirs, ours in (TOP_NAMES | LAYER_NAMES).items()}
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not name.startswith("model.layers."):
        return f"{GGUF_NAME[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAME[part]}.{kind}"


def interleave(values: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's order of q and k rows: the two halves of a head alternate."""
    halves = values.view(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quantisation: str = "F32",
    extra: Mapping[str, Tensor] = {},
) -> None:
    """As llama.cpp's converter does; also rounds the model's own weights to what the file holds."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if architecture == "qwen3" else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_eos_token_id(2)
    kind = gguf.GGMLQuantizationType[quantisation]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1
        packed = gguf.quants.quantize(
            parameter.detach().numpy(), kind if is_matrix else gguf.GGMLQuantizationType.F32
        )
        if is_matrix:
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            # Quantisation works along rows, so rows can be reordered after it.
            rows = interleave(torch.arange(len(packed)), heads[part]).numpy()
            packed = packed[rows]
        raw = None if not is_matrix else kind
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(packed), raw_dtype=raw)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_logits(path: Path, model: PreTrainedModel) -> None:
    tokens = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    (logits,) = PagedRun(load_decoder(path, torch.float32, CPU), num_sequences=1).feed([tokens])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_quantisations_of_a_llama(quantisation: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES["smollm (tied)"])
    write_gguf(tmp_path / "model.gguf", model, quantisation)
    assert_same_logits(tmp_path / "model.gguf", model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_type_that_the_package_reads(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Also those it cannot write: any bytes are blocks of each type."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = 256 // block_size * type_size
    raw = np.random.default_rng(0).integers(0, 256, (256, row_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{index}" for index in range(256)])
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    torch.testing.assert_close(embedding, expected, rtol=0, atol=0, equal_nan=True)
    q_proj = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    back = interleave(q_proj, num_heads=4)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "qwen3"])
def test_each_architecture(family: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES[family])
    write_gguf(tmp_path / "model.gguf", model)
    assert_same_logits(tmp_path / "model.gguf", model)


def test_tabulated_rope_divisors_are_used(tmp_path: Path) -> None:
    """Llama 3's GGUF files hold its RoPE scaling as a tensor of divisors."""
    model = randomize(FAMILIES["llama3 scaling"])
    scaled = model.model.rotary_emb.inv_freq
    exponents = torch.arange(len(scaled)) / len(scaled)
    divisors = model.config.rope_parameters["rope_theta"] ** -exponents / scaled
    assert divisors.max() > 2
    write_gguf(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": divisors})
    assert_same_logits(tmp_path / "model.gguf", model)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    model = randomize(FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model, extra={"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"attn_sinks"):
        load_decoder(tmp_path / "model.gguf", torch.float32, CPU)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.2, 0.5, 0.99])
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, randomize(FAMILIES["llama"]))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match="as GGUF"):
        open_checkpoint(path)


METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (VOCAB, 64)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma"}, "'gemma'"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, "a part of each head"),
        ({"llama.attention.sliding_window": 4096}, "4096 of 8192"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 3}, "3 parts"),
        ({"llama.block_count": None}, "block_count"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_gguf({**METADATA, **changes}, SHAPES)


def test_metadata_is_read() -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    ends = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9}
    config = from_gguf({**METADATA, **linear, **ends}, SHAPES)
    assert config.rope_scaling == LinearScaling(4.0)
    assert config.eos_token_ids == (2, 9)  # of a text and of a turn
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (VOCAB, 16, 4)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "La vie est",
    "The three laws of robotics are",
)


def test_the_default_model_writes_what_transformers_writes() -> None:
    """The first 64 greedy tokens of ten prompts, in float32, batched by our engine.

    transformers reads each text once, instead of writing it: if its most likely token after every
    prefix is the next one of the text, it would have written that text.
    """
    path = locate(DEFAULT_MODEL, cache_dir=default_cache_dir(), on_progress=lambda *_: None)
    tokenizer = read_gguf_tokenizer(path)[0]
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    checkpoint = open_checkpoint(path)
    written = greedy_texts(checkpoint, prompts)
    reference = as_transformers(checkpoint)
    for prompt, text_ids in zip(prompts, written, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + text_ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text_ids


def greedy_texts(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    """64 tokens after each prompt, from the whole engine."""
    config = EngineConfig(model_path="", dtype="float32", kv_cache_gib=0.2, max_model_len=512)
    device = choose_device(config)
    decoder = decoder_from(checkpoint, torch.float32, CPU)
    models = Models(decoder, None, device, ReferenceAttention())
    sampling = SamplingParams(seed=0, max_tokens=64, temperature=0, ignore_eos=True)
    requests = [request(f"{index}", ids, sampling) for index, ids in enumerate(prompts)]
    deltas = run(assemble(config, models, size_cache(config, models)), requests)
    texts = [text(deltas[item.request_id]) for item in requests]
    assert [len(ids) for ids in texts] == [64] * len(prompts)
    return texts


def as_transformers(checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' own Llama around the same dequantised weights."""
    ours = checkpoint.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        max_position_embeddings=ours.max_position_embeddings,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model
