"""What a checkpoint must hold, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.config import Llama3Scaling, from_hf
from adaflash.engine.models.weights import load_decoder, open_checkpoint
from tests.engine.models.families import BASE, CPU, save
from tests.tiny_model import write_tiny_model

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BASE}
MISTRAL = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}


def load(folder: Path) -> None:
    load_decoder(folder, torch.float32, CPU)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint; None takes one out. Dots of names are written `__`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        full = name.replace("__", ".")
        if tensor is None:
            del tensors[full]
        else:
            tensors[full] = tensor
    save_file(tensors, path)


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    rewrite(tiny, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(tiny)


def test_a_left_over_tensor_is_named(tiny: Path) -> None:
    rewrite(tiny, model__layers__9__mystery=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"no known use: model\.layers\.9\.mystery"):
        load(tiny)


def test_a_wrong_shape_is_named(tiny: Path) -> None:
    rewrite(tiny, model__layers__0__mlp__up_proj__weight=torch.zeros(7, 32))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \(7, 32\)"):
        load(tiny)


def test_harmless_extras_are_accepted(tiny: Path) -> None:
    """A tied checkpoint that stores its head all the same, and old rotary buffers."""
    head = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        tiny,
        lm_head__weight=head.clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4),
    )
    load(tiny)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save("llama", tmp_path)
    whole = open_checkpoint(tmp_path)
    names = sorted(whole.names())
    tensors = {name: whole.tensor(name) for name in names}
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    assert torch.equal(decoder.norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding-window"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, "sliding-window"),
        ({**MISTRAL, "sliding_window": 64}, "64 of 8192 tokens"),
        (MISTRAL, "4096 of 8192 tokens"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "many"}, "hidden_size"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_hf({**LLAMA, **changes}, {})


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    assert from_hf({**LLAMA, **MISTRAL, "sliding_window": 8192}, {}).family == "mistral"
    assert from_hf({**LLAMA, **MISTRAL, "sliding_window": None}, {}).family == "mistral"


def test_old_and_new_rope_keys_say_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}, {})
    new = from_hf({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}}, {})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)


def test_generation_config_says_what_ends_a_text() -> None:
    assert from_hf(LLAMA, {}).eos_token_ids == (2,)
    assert from_hf(LLAMA, {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert from_hf(LLAMA, {"eos_token_id": None}).eos_token_ids == (2,)
    assert from_hf(LLAMA, {"eos_token_id": 0}).eos_token_ids == (0,)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match="cannot read"):
        load(tmp_path)
