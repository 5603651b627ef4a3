"""GGUF files: written here from tiny transformers models, and the default model's own."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaflash.engine.build import assemble, size_cache
from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.config import EngineConfig
from adaflash.engine.devices import choose_device
from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.checkpoint import Checkpoint
from adaflash.engine.models.gguf_checkpoint import LAYER_NAMES, TOP_NAMES
from adaflash.engine.models.weights import decoder_from, load_decoder, open_checkpoint
from adaflash.engine.types import SamplingParams
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


def write_gguf(path: Path, model: PreTrainedModel, quantisation: str, *extra: str) -> None:
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
    for name in extra:
        writer.add_tensor(name, np.ones(config.hidden_size // 8, dtype=np.float32))
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
def test_every_quantisation_of_a_llama(quantisation: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES["smollm (tied)"])
    write_gguf(tmp_path / "model.gguf", model, quantisation)
    assert_same_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_architecture(family: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES[family])
    write_gguf(tmp_path / "model.gguf", model, "F32")
    assert_same_logits(tmp_path / "model.gguf", model)


def test_tabulated_rope_divisors_are_used(tmp_path: Path) -> None:
    """Llama 3's GGUF files hold its RoPE scaling as a tensor of divisors."""
    model = randomize(FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model, "F32", "rope_freqs.weight")
    assert_same_logits(tmp_path / "model.gguf", model)  # the divisors written here are ones
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config.rope_scaling is not None


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    model = randomize(FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model, "F32", "blk.0.attn_sinks.weight")
    with pytest.raises(CheckpointError, match=r"attn_sinks"):
        load_decoder(tmp_path / "model.gguf", torch.float32, CPU)


@pytest.fixture(scope="module")
def default_model() -> Checkpoint:
    path = locate(
        DEFAULT_MODEL, cache_dir=default_cache_dir(), on_progress=lambda done, total: None
    )
    return open_checkpoint(path)


PROMPTS = [
    [1, 4093, 198, 504 + 31 * number, 3575, 282, 4649, 314, 2, 198, 1, 520, 9531, 198]
    for number in range(10)
]


def test_the_default_model_writes_what_transformers_writes(default_model: Checkpoint) -> None:
    """The first 64 greedy tokens of ten prompts, in float32, ours batched by the engine."""
    reference = as_transformers(default_model)
    prompts = torch.tensor(PROMPTS)
    written = reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[:, prompts.shape[1] :]
    sampling = SamplingParams(seed=0, max_tokens=64, temperature=0, ignore_eos=True)
    requests = [request(f"{index}", ids, sampling) for index, ids in enumerate(PROMPTS)]
    config = EngineConfig(model_path="", dtype="float32", kv_cache_gib=0.2, max_model_len=512)
    device = choose_device(config)
    size = size_cache(config, default_model.config, device)
    decoder = decoder_from(default_model, torch.float32, CPU)
    deltas = run(assemble(config, decoder, device, size), requests)
    assert [text(deltas[f"{index}"]) for index in range(10)] == written.tolist()


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
