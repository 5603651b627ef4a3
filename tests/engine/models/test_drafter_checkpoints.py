"""What a drafter's checkpoint may hold, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.engine.errors import CheckpointError
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.drafter_config import default_tap_layers
from adaflash.engine.models.heads import NoHead, SurvivalHead, ThresholdHead
from adaflash.engine.models.weights import load_drafter, open_checkpoint
from tests.engine.models.families import CPU
from tests.tiny_drafter import (
    DRAFT_LAYERS,
    HEAD_INNER,
    MASK,
    TAPS,
    drafter_config,
    drafter_tensors,
    survival_head_tensors,
    threshold_head_tensors,
    write_tiny_drafter,
)
from tests.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, write_tiny_model

DFLASH = {"mask_token_id": MASK, "target_layer_ids": TAPS}
ADAFLASH = {
    "use_thresh_head_two_model": True,
    "thresh_head_bottleneck_dim": HEAD_INNER,
    "thresh_head_direct_len": True,
}
THRESHOLD, SURVIVAL = "thresh_head_two_model.", "survival_head."
KEY_ROWS = slice(HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_checkpoint(write_tiny_model(tmp_path_factory.mktemp("target"))).config


def load(
    folder: Path,
    target: ModelConfig,
    tensors: Mapping[str, Tensor] = drafter_tensors(),
    config: Mapping[str, object] = {},
    dflash: Mapping[str, object] = {},
) -> Drafter:
    """Write a plain DFlash drafter with these changes, and load it in float32."""
    changes = {"dflash_config": {**DFLASH, **dflash}, **config}
    write_tiny_drafter(folder, drafter_config(**changes), tensors)
    return load_drafter(folder, target, torch.float32, CPU)


def test_a_published_checkpoint_loads_as_it_is(tmp_path: Path, target: ModelConfig) -> None:
    """With AdaFlash's head, stored in bfloat16; loaded in float32."""
    stored = {
        name: tensor.bfloat16()
        for name, tensor in (drafter_tensors() | threshold_head_tensors()).items()
    }
    extras = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dtype": "bfloat16"}
    drafter = load(tmp_path, target, stored, config=extras, dflash=ADAFLASH)
    assert drafter.config.block_size == 8
    assert drafter.config.widths == (8,)
    assert drafter.config.tap_layers == tuple(TAPS)
    assert drafter.config.mask_token_id == MASK
    assert isinstance(drafter.head, ThresholdHead)
    assert drafter.token_ids is None
    parameters = dict(drafter.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    assert not any(parameter.is_meta for parameter in parameters.values())
    for name in (
        "fc.weight",
        "hidden_norm.weight",
        "layers.1.self_attn.q_norm.weight",
        THRESHOLD + "res.0.bias",
    ):
        assert torch.equal(parameters[name], stored[name].float())
    keys = parameters["layers.1.self_attn.qkv_proj.weight"][KEY_ROWS]
    assert torch.equal(keys, stored["layers.1.self_attn.k_proj.weight"].float())


def test_shards_are_read_through_their_index(tmp_path: Path, target: ModelConfig) -> None:
    tensors = drafter_tensors() | threshold_head_tensors()
    names = sorted(tensors)
    whole = load(tmp_path, target, tensors, dflash=ADAFLASH).state_dict()
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {name: file for file, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = load_drafter(tmp_path, target, torch.float32, CPU).state_dict()
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_plain_drafter_has_no_head(tmp_path: Path, target: ModelConfig) -> None:
    assert isinstance(load(tmp_path, target).head, NoHead)
    off = {"use_thresh_head_two_model": False, "thresh_head_direct_len": False}
    assert isinstance(load(tmp_path, target, dflash=off).head, NoHead)


def test_weights_come_in_the_precision_asked_for_and_heads_in_float32(
    tmp_path: Path, target: ModelConfig
) -> None:
    tensors = drafter_tensors() | threshold_head_tensors() | survival_head_tensors()
    write_tiny_drafter(tmp_path, tensors=tensors)
    drafter = load_drafter(tmp_path, target, torch.bfloat16, CPU)
    for name, parameter in drafter.named_parameters():
        is_head = name.startswith((THRESHOLD, SURVIVAL))
        assert parameter.dtype == (torch.float32 if is_head else torch.bfloat16), name
        if is_head:
            assert torch.equal(parameter, tensors[name]), name
    assert drafter.inv_freq.dtype == torch.float32


def test_our_extensions_load(tmp_path: Path, target: ModelConfig) -> None:
    own = {
        "mask_embedding": torch.arange(HIDDEN) / 7,
        "draft_token_ids": torch.tensor([9, 2, VOCAB - 1, 0], dtype=torch.int32),
    }
    tensors = drafter_tensors() | survival_head_tensors() | threshold_head_tensors() | own
    changes = {"mask_token_id": None, "widths": [4, 2, 4]}
    drafter = load(tmp_path, target, tensors, dflash=changes)
    assert drafter.config.widths == (2, 4, 8)
    assert drafter.config.mask_token_id is None
    assert torch.equal(drafter.mask_embedding, own["mask_embedding"])
    assert drafter.token_ids is not None
    assert drafter.token_ids.tolist() == [0, 2, 9, VOCAB - 1]
    assert isinstance(drafter.head, SurvivalHead), "the finer head goes first"


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_checkpoint_says_whether_q_and_k_are_normalised(
    model_type: str, qk_norm: bool, tmp_path: Path, target: ModelConfig
) -> None:
    drafter = load(
        tmp_path, target, drafter_tensors(qk_norm=qk_norm), config={"model_type": model_type}
    )
    assert drafter.config.layers.qk_norm == qk_norm


@pytest.mark.parametrize(
    ("num_target_layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (48, (1, 12, 23, 34, 45)),
    ],
)
def test_taps_follow_the_published_rule_if_none_are_named(
    num_target_layers: int, taps: tuple[int, ...], tmp_path: Path, target: ModelConfig
) -> None:
    assert default_tap_layers(num_target_layers, 5) == taps
    deep = replace(target, num_layers=num_target_layers)
    wide = drafter_tensors() | {"fc.weight": torch.randn(HIDDEN, 5 * HIDDEN)}
    drafter = load(
        tmp_path,
        deep,
        wide,
        config={"num_target_layers": num_target_layers},
        dflash={"target_layer_ids": None},
    )
    assert drafter.config.tap_layers == taps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": VOCAB + 1}, "its vocabulary is 273, and the target's is 272"),
        ({"num_target_layers": 3}, "its number of target layers is 3, and the target's is 2"),
        ({"hidden_size": 64}, "its hidden size is 64, and the target's is 32"),
        ({"hidden_size": 0}, "its hidden size is 0"),
        ({"dflash_config": None}, "has no dflash_config"),
        ({"dflash_config": []}, "has no dflash_config"),
        ({"block_size": 1}, "block_size must be at least 2, not 1"),
        ({"block_size": 8.0}, "block_size must be a whole number"),
        ({"block_size": None}, "has no block_size"),
        ({"num_target_layers": None}, "has no num_target_layers"),
        ({"model_type": "gemma"}, "'gemma' are not supported; these are: llama, mistral"),
        ({"model_type": None}, "None are not supported"),
        ({"model_type": ["qwen3"]}, "not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"intermediate_size": 64}, r"gate_proj\.weight has shape \(48, 32\)"),
        ({"num_hidden_layers": 3}, r"lacks layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"no known use: layers\.1\.input_layernorm\.weight"),
        ({"num_hidden_layers": 0}, r"no known use: layers\.0\.input_layernorm\.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path, target: ModelConfig
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, target, config=changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": [0, LAYERS]}, r"\[2\] are out of range: the target has 2 layers"),
        ({"target_layer_ids": [-1, 0]}, r"\[-1\] are out of range"),
        ({"target_layer_ids": None}, r"\[-1\] are out of range"),  # the rule needs more layers
        ({"target_layer_ids": [0]}, r"names 1 layers, but fc\.weight reads 2"),
        ({"target_layer_ids": []}, r"names 0 layers, but fc\.weight reads 2"),
        ({"target_layer_ids": [0, True]}, "list of whole numbers"),
        ({"target_layer_ids": "01"}, "list of whole numbers"),
        ({"mask_token_id": VOCAB}, "mask_token_id 272 is outside the vocabulary of 272"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
        ({"mask_token_id": "<mask>"}, "mask_token_id must be a whole number"),
        ({"mask_token_id": None}, "lacks mask_embedding"),
        ({"use_thresh_head_two_model": True, "thresh_head_direct_len": False}, "direct_len"),
        ({"thresh_head_direct_len": False}, "direct_len"),
        ({"widths": [1, 4]}, "widths must be between 2 and the block size"),
        ({"widths": [16]}, "widths must be between 2 and the block size"),
        ({"widths": [4.0]}, "widths must be a list of whole numbers"),
        ({"widths": 4}, "widths must be a list of whole numbers"),
    ],
)
def test_a_dflash_config_that_does_not_fit_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path, target: ModelConfig
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, target, dflash=changes)


NO_IDS = torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc.weight": None}, r"has no fc\.weight: this is no DFlash"),
        ({"hidden_norm.weight": None}, r"lacks hidden_norm\.weight"),
        ({"layers.1.self_attn.k_proj.weight": None}, r"lacks layers\.1\.self_attn\.k_proj\.weight"),
        ({"layers.1.self_attn.k_norm.weight": None}, r"lacks layers\.1\.self_attn\.k_norm\.weight"),
        ({THRESHOLD + "out.bias": None}, r"lacks thresh_head_two_model\.out\.bias"),
        ({THRESHOLD + "down.weight": None}, r"no known use: thresh_head_two_model\.down\.bias"),
        ({SURVIVAL + "position_bias": None}, r"lacks survival_head\.position_bias"),
        ({"mask_embedding": torch.zeros(HIDDEN)}, "no known use: mask_embedding"),
        ({"prob_head.weight": torch.zeros(2)}, r"no known use: prob_head\.weight"),
        ({"draft_token_ids": torch.tensor([0, VOCAB])}, "target's vocabulary of 272"),
        ({"draft_token_ids": torch.tensor([-1, 0])}, "target's vocabulary of 272"),
        ({"draft_token_ids": NO_IDS}, "target's vocabulary of 272"),
        ({"draft_token_ids": torch.tensor([1.0, 2.5])}, "target's vocabulary of 272"),
        ({"draft_token_ids": torch.tensor([4, 1, 4])}, "holds a token twice"),
        # Shapes of every kind.
        ({"fc.weight": torch.zeros(HIDDEN)}, r"fc\.weight has shape \(32,\)"),
        ({"fc.weight": torch.tensor(1.0)}, r"fc\.weight has shape \(\)"),
        ({"fc.weight": torch.zeros(0)}, r"fc\.weight has shape \(0,\)"),
        ({"fc.weight": torch.zeros(HIDDEN, 0)}, r"fc\.weight has shape \(32, 0\)"),
        ({"fc.weight": torch.zeros(0, 2 * HIDDEN)}, r"fc\.weight has shape \(0, 64\)"),
        ({"fc.weight": torch.zeros(HIDDEN, 2, HIDDEN)}, r"fc\.weight has shape \(32, 2, 32\)"),
        ({"fc.weight": torch.zeros(HIDDEN, 65)}, r"fc\.weight reads 65 values"),
        ({"fc.weight": torch.zeros(HIDDEN, 31)}, r"fc\.weight reads 31 values"),
        ({"fc.weight": torch.zeros(HIDDEN, 96)}, r"names 2 layers, but fc\.weight reads 3"),
        ({"norm.weight": torch.zeros(HIDDEN, 1)}, r"norm\.weight has shape \(32, 1\)"),
        ({THRESHOLD + "down.weight": torch.tensor(1.0)}, r"down\.weight has shape \(\)"),
        ({THRESHOLD + "down.weight": torch.zeros(HEAD_INNER)}, r"down\.weight has shape \(16,\)"),
        ({THRESHOLD + "down.weight": torch.zeros(0, 64)}, r"down\.weight has shape \(0, 64\)"),
        ({THRESHOLD + "down.weight": torch.zeros(16, 63)}, r"down\.weight has shape \(16, 63\)"),
        ({THRESHOLD + "down.weight": torch.zeros(9, 64)}, r"two_model\.\S+ has shape \(16"),
        ({THRESHOLD + "out.weight": torch.zeros(2, 16)}, r"out\.weight has shape \(2, 16\)"),
        ({SURVIVAL + "down.weight": torch.tensor(1.0)}, r"down\.weight has shape \(\)"),
        ({SURVIVAL + "position_bias": torch.zeros(8)}, r"position_bias has shape \(8,\)"),
        ({SURVIVAL + "position_bias": torch.tensor(0.0)}, r"position_bias has shape \(\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    changes: dict[str, Tensor | None], words: str, tmp_path: Path, target: ModelConfig
) -> None:
    tensors = drafter_tensors() | threshold_head_tensors() | survival_head_tensors()
    changed = {**tensors, **changes}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, target, kept)


@pytest.mark.parametrize("name", [*drafter_tensors(), *threshold_head_tensors()])
def test_every_tensor_is_asked_for(name: str, tmp_path: Path, target: ModelConfig) -> None:
    tensors = drafter_tensors() | threshold_head_tensors()
    del tensors[name]
    with pytest.raises(CheckpointError, match=r"lacks |no fc\.weight|no known use"):
        load(tmp_path, target, tensors)


def test_a_target_of_another_size_is_refused(tmp_path: Path, target: ModelConfig) -> None:
    """The reason is the size, whatever else does not fit because of it."""
    write_tiny_drafter(tmp_path)
    for size in (16, 31, 64, 48):
        with pytest.raises(CheckpointError, match=f"size is 32, and the target's is {size}"):
            load_drafter(tmp_path, replace(target, hidden_size=size), torch.float32, CPU)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, target: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_drafter(tmp_path, target, torch.float32, CPU)
    write_tiny_drafter(tmp_path)
    config = tmp_path / "config.json"
    for broken in ("{", "[]", '{"dflash_config": {}}', ""):
        config.write_text(broken)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_drafter(tmp_path, target, torch.float32, CPU)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read \S+config\.json"):
        load_drafter(tmp_path, target, torch.float32, CPU)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"cannot read \S+model\.safetensors"):
        load_drafter(tmp_path, target, torch.float32, CPU)


def test_a_target_is_no_drafter(tmp_path: Path, target: ModelConfig) -> None:
    folder = write_tiny_model(tmp_path)
    assert "fc.weight" not in load_file(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="this is no DFlash or AdaFlash drafter"):
        load_drafter(folder, target, torch.float32, CPU)


def test_the_tiny_drafter_of_other_tests_has_a_head_and_widths(
    tmp_path: Path, target: ModelConfig
) -> None:
    drafter = load_drafter(write_tiny_drafter(tmp_path), target, torch.float32, CPU)
    assert drafter.config.widths == (2, 4, 8)
    assert len(drafter.layers) == DRAFT_LAYERS
    assert isinstance(drafter.head, ThresholdHead)
