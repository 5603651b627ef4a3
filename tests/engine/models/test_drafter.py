"""The paged drafter against its dense twin, behind a target that transformers computes, float32."""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from adaflash.engine.batch_inputs import Paging, VerifyRow
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.config import ModelConfig
from adaflash.engine.models.weights import load_decoder, load_drafter
from adaflash.engine.sampler import Sampler
from adaflash.engine.speculation.block_drafter import BlockDrafter
from adaflash.engine.speculation.step import Block
from adaflash.engine.target import TargetModel
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence
from adaflash.kernels.reference_attention import ReferenceAttention
from adaflash.kernels.sampling import gumbel_noise, noise_keys
from tests.engine.models.dense_drafter import DenseDrafter
from tests.engine.models.families import CPU
from tests.tiny_drafter import (
    MASK,
    bias_tensors,
    drafter_config,
    drafter_tensors,
    survival_head_tensors,
    threshold_head_tensors,
    write_tiny_drafter,
)
from tests.tiny_model import HEAD_DIM, HIDDEN, VOCAB, write_tiny_model

TOLERANCE = 1e-4  # absolute; states are about 1 in size
PAGE_SIZE, PAGES_EACH = 4, 16
WIDTHS = (8, 2, 5)
TEMPERATURES = (0.0, 0.7, 1.5)
THETA, EPS = 5e4, 1e-6  # not those of the target
DRAFT_IDS = torch.tensor([3, 258, 17, *range(40, 200, 3)])


@dataclass(frozen=True)
class Kind:
    """One layout of a drafter's checkpoint."""

    tensors: dict[str, Tensor]
    config: dict[str, object]
    taps: tuple[int, ...] = (0, 1)
    mask: int | None = MASK
    head_dim: int = HEAD_DIM

    def write(self, folder: Path) -> Path:
        dflash = {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)}
        own = {"head_dim": self.head_dim, "rope_theta": THETA, "rms_norm_eps": EPS}
        config = drafter_config(dflash_config=dflash, **own, **self.config)
        return write_tiny_drafter(folder, config, self.tensors)


MASK_EMBEDDING = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
PUBLISHED = Kind(drafter_tensors(), {})
KINDS = {
    "published": PUBLISHED,
    "llama layers, without norms of q and k": Kind(
        drafter_tensors(qk_norm=False), {"model_type": "llama"}
    ),
    "qwen2 layers, with biases": Kind(
        drafter_tensors(qk_norm=False) | bias_tensors(), {"model_type": "qwen2"}
    ),
    "one key head, queries wider than the state": Kind(
        drafter_tensors(num_heads=6, num_kv_heads=1, head_dim=16),
        {"num_attention_heads": 6, "num_key_value_heads": 1},
        head_dim=16,
    ),
    "taps in another order": Kind(drafter_tensors(), {}, taps=(1, 0)),
    "its own mask embedding": Kind(
        drafter_tensors() | {"mask_embedding": MASK_EMBEDDING}, {}, mask=None
    ),
}


@dataclass(frozen=True)
class Target:
    """One checkpoint, and transformers' model of it."""

    folder: Path
    model: PreTrainedModel

    @torch.inference_mode()
    def features(self, token_ids: list[int], taps: tuple[int, ...]) -> Tensor:
        """Outputs of the tapped layers side by side, [T, taps * H]."""
        outputs: list[Tensor] = []
        layers = self.model.model.layers
        hooks = [
            layer.register_forward_hook(lambda _layer, _args, output: outputs.append(output[0]))
            for layer in layers
        ]
        self.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat([outputs[tap] for tap in taps], dim=-1)

    @property
    def embedding(self) -> Tensor:
        """[VOCAB, H]; the LM head too, as the model ties them."""
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_model(tmp_path_factory.mktemp("target"))
    return Target(folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


class PagedDrafting:
    """Target and drafter at work on several sequences, whose pages are scattered and shared out."""

    def __init__(self, target: Target, folder: Path, sampling: Many[SamplingParams]) -> None:
        decoder = load_decoder(target.folder, torch.float32, CPU)
        self.drafter = load_drafter(folder, decoder.config, torch.float32, CPU)
        paging = Paging(ReferenceAttention(), PAGE_SIZE, CPU)
        num_pages = len(sampling) * PAGES_EACH
        own = self.drafter.config
        self._target = TargetModel(
            decoder, _unwritten(decoder.config, num_pages), paging, own.tap_layers
        )
        kv = _unwritten(own.layers, num_pages)
        sampler = Sampler(VOCAB, frozenset(), self.drafter.token_ids)
        self.source = BlockDrafter(self.drafter, decoder, kv, sampler, paging)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        self.sequences = [
            Sequence(Request(request_id=str(n), prompt_ids=text(n), sampling=params), order=n)
            for n, params in enumerate(sampling)
        ]
        for sequence, pages in zip(self.sequences, order.view(-1, PAGES_EACH), strict=True):
            sequence.pages = pages.tolist()

    def prefill(self, counts: Many[int]) -> None:
        """The next `counts[n]` tokens of each prompt in one pass; behind its end comes a token."""
        pairs = [pair for pair in zip(self.sequences, counts, strict=True) if pair[1]]
        self._verify(
            [VerifyRow(Row(s, s.num_committed, count, RowKind.PREFILL)) for s, count in pairs]
        )
        for sequence, count in pairs:
            sequence.num_committed += count
            if sequence.num_uncommitted == 0:
                sequence.token_ids.append(7 + sequence.order)

    def verify(self, drafts: Many[tuple[int, ...]], num_accepted: Many[int]) -> None:
        """A decoding step: so many of the drafts turn out right, then comes another token."""
        rows = self.rows(len(drafts))
        self._verify([VerifyRow(*pair) for pair in zip(rows, drafts, strict=True)])
        for row, own, accepted in zip(rows, drafts, num_accepted, strict=True):
            row.sequence.token_ids += [*own[:accepted], 200 + row.sequence.order]
            row.sequence.num_committed += 1 + accepted

    def rows(self, count: int) -> list[Row]:
        """Decoding rows of the first sequences."""
        return [Row(s, s.num_committed, 1, RowKind.VERIFY, 7) for s in self.sequences[:count]]

    def _verify(self, rows: list[VerifyRow]) -> None:
        self.source.observe(self._target.verify(rows))


def _unwritten(model: ModelConfig, num_pages: int) -> KVCache:
    """A cache in which whatever is read before it is written shows."""
    kv = KVCache(model, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
    for layer in range(model.num_layers):
        for pages in kv.layer(layer):
            pages.fill_(math.nan)
    return kv


def text(number: int) -> list[int]:
    """A prompt; the lengths of the first four: 5, 18, 31, 12."""
    length = (5, 18, 31, 12)[number]
    generator = torch.Generator().manual_seed(number)
    token_ids: list[int] = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return token_ids


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(seed=0, max_tokens=99, temperature=0.0)] * count


def state_error(run: PagedDrafting, target: Target, kind: Kind, count: int) -> float:
    """How far blocks of the first sequences are from the dense twin's of the same texts."""
    dense = DenseDrafter(kind.tensors, kind.head_dim, THETA, EPS)
    mask = MASK_EMBEDDING if kind.mask is None else target.embedding[kind.mask]
    rows = run.rows(count)
    error = 0.0
    features = [target.features(row.sequence.token_ids[:-1], kind.taps) for row in rows]
    for width in WIDTHS:
        found = run.source.denoise(rows, width).hidden
        assert found.shape == (count, width, HIDDEN)
        for row, own, context in zip(rows, found, features, strict=True):
            anchor = target.embedding[row.sequence.token_ids[-1]]
            expected = dense.hidden(context, torch.stack([anchor] + [mask] * (width - 1)))
            error = max(error, (own - expected).abs().nan_to_num(math.inf).max().item())
    return error


@pytest.mark.parametrize("name", KINDS)
def test_blocks_have_the_states_of_the_published_algorithm(
    name: str, target: Target, tmp_path: Path
) -> None:
    """After chunked prefill, and after steps that reject drafts, whose slots are written over."""
    kind = KINDS[name]
    run = PagedDrafting(target, kind.write(tmp_path), greedy(4))
    run.prefill([5, 11, 3, 0])
    run.prefill([0, 7, 20, 2])
    run.prefill([0, 0, 8, 3])
    assert state_error(run, target, kind, count=3) < TOLERANCE
    run.verify([(1, 2, 3), (), (4, 5, 6, 7, 8, 9, 10)], num_accepted=[1, 0, 4])
    assert state_error(run, target, kind, count=3) < TOLERANCE
    run.prefill([0, 0, 0, 7])
    run.verify([(11,), (12, 13), (), tuple(range(20, 27))], num_accepted=[1, 0, 0, 7])
    assert state_error(run, target, kind, count=4) < TOLERANCE


def test_every_part_of_the_drafter_matters(target: Target, tmp_path: Path) -> None:
    """The comparison above can fail: it does for a drafter with one weight changed."""
    run = PagedDrafting(target, PUBLISHED.write(tmp_path), greedy(1))
    for name, parameter in run.drafter.named_parameters():
        before = parameter.detach().clone()
        parameter.data[0] += 0.5
        (sequence,) = run.sequences
        sequence.token_ids, sequence.num_committed = text(0), 0
        run.prefill([5])
        assert state_error(run, target, PUBLISHED, count=1) > 10 * TOLERANCE, name
        parameter.data.copy_(before)


def drafting(
    target: Target, folder: Path, *, token_ids: Tensor | None, temperature: float
) -> tuple[PagedDrafting, Block]:
    """A block of 8 for each of three sequences with seeds of their own."""
    tensors = drafter_tensors() if token_ids is None else reduced(token_ids)
    sampling = [SamplingParams(seed=n, max_tokens=99, temperature=temperature) for n in range(3)]
    run = PagedDrafting(target, Kind(tensors, {}).write(folder), sampling)
    run.prefill([5, 18, 31])
    return run, run.source.denoise(run.rows(3), 8)


def reduced(token_ids: Tensor) -> dict[str, Tensor]:
    return drafter_tensors() | {"draft_token_ids": token_ids}


@pytest.mark.parametrize("token_ids", [None, DRAFT_IDS], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_proposals_are_the_noisy_argmax_of_the_targets_head(
    token_ids: Tensor | None, temperature: float, target: Target, tmp_path: Path
) -> None:
    run, block = drafting(target, tmp_path, token_ids=token_ids, temperature=temperature)
    allowed = torch.arange(VOCAB) if token_ids is None else token_ids
    banned = torch.full((VOCAB,), -math.inf).index_fill(0, allowed, 0.0)
    proposed = run.source.propose(block, [3, 0, 7])
    assert [len(own) for own in proposed] == [3, 0, 7]
    for row, own, hidden in zip(block.rows, proposed, block.hidden, strict=True):
        scores = hidden @ target.embedding.T + banned
        for place, token in enumerate(own, start=1):
            if temperature > 0:
                # The token stands `place` behind the newest known one.
                position = len(row.sequence.token_ids) - 1 + place
                key = noise_keys(row.sequence.request.sampling.seed, position)
                noise = gumbel_noise(torch.tensor([key]), torch.arange(VOCAB, dtype=torch.int32))
                scores[place] = scores[place] / temperature + noise[0]
            assert token == int(scores[place].argmax())
            assert token in allowed.tolist()


def test_some_proposals_are_noisy_and_some_were_not_allowed(target: Target, tmp_path: Path) -> None:
    """So the noise and the reduced vocabulary above are put to the test."""
    proposals = {
        (temperature, token_ids is None): run.source.propose(block, [7, 7, 7])
        for temperature in TEMPERATURES
        for token_ids in (None, DRAFT_IDS)
        for run, block in [drafting(target, tmp_path, token_ids=token_ids, temperature=temperature)]
    }
    assert len({str(tokens) for tokens in proposals.values()}) == len(proposals)


@pytest.mark.parametrize("token_ids", [None, DRAFT_IDS], ids=["all tokens", "some tokens"])
def test_the_head_runs_on_the_rows_and_tokens_asked_for_alone(
    token_ids: Tensor | None,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, block = drafting(target, tmp_path, token_ids=token_ids, temperature=0.0)
    products: list[tuple[int, int]] = []
    linear = nn.functional.linear

    def counting(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append((rows.numel() // HIDDEN, len(weight)))
        return linear(rows, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counting)
    num_tokens = VOCAB if token_ids is None else len(token_ids)
    run.source.propose(block, [3, 0, 7])
    assert products == [(10, num_tokens)]
    assert run.source.propose(block, [0, 0, 0]) == [(), (), ()]
    assert products == [(10, num_tokens)]


@pytest.mark.parametrize(
    "head", [{}, threshold_head_tensors(), survival_head_tensors()], ids=["none", "share", "hazard"]
)
def test_estimates_read_hidden_states_alone(
    head: dict[str, Tensor], target: Target, tmp_path: Path
) -> None:
    """Not the texts, not what will be drawn: lengths made from them cannot bias a choice."""
    folder = Kind(drafter_tensors() | head, {}).write(tmp_path)
    hot = [SamplingParams(seed=n, max_tokens=9, temperature=1.5) for n in range(3)]
    cold, warm = (PagedDrafting(target, folder, sampling) for sampling in (greedy(3), hot))
    for sequence in warm.sequences:
        sequence.token_ids = sequence.token_ids[::-1]
    hidden = torch.randn(3, 8, HIDDEN, generator=torch.Generator().manual_seed(4))
    first, second = (run.source.estimate(Block(tuple(run.rows(3)), hidden)) for run in (cold, warm))
    assert first.conditional.shape == (3, 7)
    assert (first.conditional == second.conditional).all()
    assert (first.ratio == second.ratio).all()
