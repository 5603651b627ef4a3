"""What the target thought while it wrote: computed once per text, kept on disk.

Training reads every text several times, and the target's pass costs more than the drafter's, so its
tapped states, its last states and its most likely next tokens are kept beside each shard, in the
target's precision. One file per shard, written under a temporary name and renamed.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaflash.engine.batch_inputs import Paging, VerifyRow, build_inputs
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.trajectories import PATTERN, Trajectory, read_shard
from adaflash.engine.types import Request, Row, RowKind, SamplingParams
from adaflash.engine.types import Sequence as EngineSequence
from adaflash.kernels.reference_attention import ReferenceAttention

PAGE_SIZE = 16
TOKENS_AT_ONCE = 2048  # of one target pass


@dataclass(frozen=True)
class Text:
    """A trajectory and what the target thought of it, T tokens."""

    trajectory: Trajectory
    token_ids: Tensor  # [T] int64
    features: Tensor  # [T, taps * hidden]
    last: Tensor  # [T, hidden], after the target's last norm; the head reads the next token there
    teacher: Tensor  # [T] int64, the most likely next token


def ensure_features(
    shards: Path, decoder: Decoder, taps: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Compute what is missing; yields (shards done, shards in all)."""
    paths = sorted(shards.glob(PATTERN))
    reader = _TargetReader(decoder, taps)
    for number, path in enumerate(paths, start=1):
        target = features_of(path, taps)
        if not target.exists():
            scratch = target.with_name(f".{target.name}.{os.getpid()}")
            save_file(reader.read(read_shard(path)), scratch)
            scratch.replace(target)
        yield number, len(paths)


def features_of(shard: Path, taps: tuple[int, ...]) -> Path:
    """Where the features of a shard are kept."""
    name = "-".join(map(str, taps))
    return shard.with_name(f"features-{name}-{shard.stem.partition('-')[2]}.safetensors")


class TextStore:
    """Texts of the shards that have features, read from disk when asked for."""

    def __init__(self, folders: Sequence[Path], taps: tuple[int, ...]) -> None:
        self._files: list[Path] = []
        self._places: list[tuple[int, int]] = []  # file and first token of each text
        self.trajectories: list[Trajectory] = []
        for path in (path for folder in folders for path in sorted(folder.glob(PATTERN))):
            file = features_of(path, taps)
            if not file.exists():
                continue
            start = 0
            for trajectory in read_shard(path):
                self._places.append((len(self._files), start))
                self.trajectories.append(trajectory)
                start += len(trajectory.token_ids)
            self._files.append(file)

    def __len__(self) -> int:
        return len(self.trajectories)

    def text(self, index: int) -> Text:
        file, start = self._places[index]
        trajectory = self.trajectories[index]
        end = start + len(trajectory.token_ids)
        with safe_open(str(self._files[file]), framework="pt") as stored:
            features, last, teacher = (
                stored.get_slice(name)[start:end] for name in ("features", "last", "teacher")
            )
        token_ids = torch.tensor(trajectory.token_ids)
        return Text(trajectory, token_ids, features, last, teacher.long())


class _TargetReader:
    """The target over whole texts, through the engine's own forward pass."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        self._decoder = decoder
        self._taps = taps
        self._weight = decoder.head_weight

    @torch.inference_mode()
    def read(self, trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
        """Features of all tokens, one text behind the other."""
        parts: dict[str, list[Tensor]] = {"features": [], "last": [], "teacher": []}
        for batch in _batches(trajectories):
            for name, tensor in self._pass(batch).items():
                parts[name].append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def _pass(self, batch: Sequence[Trajectory]) -> dict[str, Tensor]:
        device = self._weight.device
        pages_of = [-(-len(item.token_ids) // PAGE_SIZE) for item in batch]
        kv = KVCache(
            self._decoder.config,
            num_pages=sum(pages_of),
            page_size=PAGE_SIZE,
            dtype=self._weight.dtype,
            device=device,
        )
        paging = Paging(ReferenceAttention(), PAGE_SIZE, device)
        rows, first = list[VerifyRow](), 0
        for item, count in zip(batch, pages_of, strict=True):
            rows.append(_whole(item, list(range(first, first + count))))
            first += count
        inputs = build_inputs([row.span for row in rows], paging, causal=True)
        token_ids = torch.tensor([t for item in batch for t in item.token_ids], device=device)
        output = self._decoder(token_ids, inputs, kv, self._taps)
        teacher = torch.cat(
            [self._decoder.logits(part).argmax(-1) for part in output.hidden.split(512)]
        )
        return {
            "features": output.features.cpu(),
            "last": output.hidden.cpu(),
            "teacher": teacher.int().cpu(),
        }


def _whole(trajectory: Trajectory, pages: list[int]) -> VerifyRow:
    """A row that computes all tokens of a text."""
    request = Request(
        request_id=trajectory.name,
        prompt_ids=list(trajectory.token_ids),
        sampling=SamplingParams(seed=0, max_tokens=1),
    )
    sequence = EngineSequence(request, order=0, pages=pages)
    return VerifyRow(Row(sequence, 0, len(trajectory.token_ids), RowKind.PREFILL))


def _batches(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Runs of at most TOKENS_AT_ONCE tokens, or one text."""
    batch: list[Trajectory] = []
    for item in trajectories:
        if batch and sum(len(t.token_ids) for t in [*batch, item]) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
