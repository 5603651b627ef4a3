"""Choices: one token for each row of logits, every sampling parameter honoured.

The choice at absolute position t is `argmax_v(log p_t(v) + G(seed, t, v))` with counter-based
noise G, or the plain argmax at temperature 0. So it depends on the request alone, never on its
neighbours in the batch or on how many positions a step covers. The drafter proposes tokens with the
same rules and the same noise, from its own logits: the closer these are to the target's, the more
often both choose alike.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.engine.types import SamplingParams, Sequence, TokenLogprobs
from adaflash.kernels.sampling import (
    FilterParams,
    filter_logits,
    gumbel_noise,
    noise_keys,
    penalize,
)

BAN = -100.0  # a logit bias this low or lower forbids the token


@dataclass(frozen=True)
class ChoiceRow:
    """One position whose next token is chosen: after the sequence's tokens and these drafts.

    Drafts of one block are chosen together: those before this one are only counted, as `unseen`.
    """

    sequence: Sequence
    drafts: tuple[int, ...] = ()
    unseen: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.sampling

    @property
    def position(self) -> int:
        """Absolute position of the token to choose."""
        return len(self.sequence.token_ids) + len(self.drafts) + self.unseen

    @property
    def num_output_tokens(self) -> int:
        return self.sequence.num_output_tokens + len(self.drafts) + self.unseen

    @property
    def output_ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.sequence.num_prompt_tokens :], *self.drafts]


@dataclass(frozen=True)
class Choice:
    token_id: int
    logprobs: TokenLogprobs | None  # if the request asked for them


class Sampler:
    """Chooses tokens for a model with `vocab_size` tokens and these end-of-sequence ids.

    token_ids: [V] int64, ascending: the tokens that the columns of the logits stand for, if these
    are not all of the vocabulary.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], token_ids: Tensor | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._token_ids = torch.arange(vocab_size) if token_ids is None else token_ids
        self._noise_ids = self._token_ids.to(torch.int32)
        self._columns = (
            None
            if token_ids is None
            else {token: column for column, token in enumerate(token_ids.tolist())}
        )

    def choose(self, logits: Tensor, rows: Many[ChoiceRow]) -> list[Choice]:
        """One choice a row. logits: [N, V] float32, left as they are."""
        columns = self._scores(logits, rows).argmax(dim=-1)
        logprobs = _logprobs(logits, columns, rows)
        return [
            Choice(token_id, logprobs.get(index))
            for index, token_id in enumerate(self._tokens_at(columns))
        ]

    def token_ids(self, logits: Tensor, rows: Many[ChoiceRow]) -> list[int]:
        """As `choose`, the tokens alone."""
        return self._tokens_at(self._scores(logits, rows).argmax(dim=-1))

    def _scores(self, logits: Tensor, rows: Many[ChoiceRow]) -> Tensor:
        return self._noisy(self._penalized(self._biased(logits, rows), rows), rows)

    def _tokens_at(self, columns: Tensor) -> list[int]:
        found: list[int] = self._token_ids.to(columns.device)[columns].tolist()
        return found

    def _column_of(self, token_id: int) -> int | None:
        return token_id if self._columns is None else self._columns.get(token_id)

    def _biased(self, logits: Tensor, rows: Many[ChoiceRow]) -> Tensor:
        """Add logit biases; ban what ends a request that must go on (min_tokens)."""
        at_row: list[int] = []
        at_column: list[int] = []
        bias: list[float] = []
        for index, row in enumerate(rows):
            changes = {
                token: -math.inf if value <= BAN else value
                for token, value in row.params.logit_bias.items()
            }
            if row.num_output_tokens < row.params.min_tokens:
                enders = row.params.stop_token_ids | self._eos_token_ids
                changes.update(dict.fromkeys(enders, -math.inf))
            for token, value in changes.items():
                column = self._column_of(token)
                if column is not None:
                    at_row.append(index)
                    at_column.append(column)
                    bias.append(value)
        if not bias:
            return logits
        where = (torch.tensor(at_row), torch.tensor(at_column))
        return logits.index_put(where, logits.new_tensor(bias), accumulate=True)

    def _penalized(self, logits: Tensor, rows: Many[ChoiceRow]) -> Tensor:
        chosen = _select(rows, _has_penalty)
        if not chosen:
            return logits
        counts = torch.stack([self._count(rows[i].output_ids) for i in chosen])
        in_prompt = torch.stack(
            [self._count(rows[i].sequence.request.prompt_ids) > 0 for i in chosen]
        )
        penalties = logits.new_tensor(
            [
                (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                for p in (rows[i].params for i in chosen)
            ]
        )
        device = logits.device
        changed = penalize(logits[chosen], counts.to(device), in_prompt.to(device), penalties)
        return logits.index_copy(0, torch.tensor(chosen, device=device), changed)

    def _noisy(self, logits: Tensor, rows: Many[ChoiceRow]) -> Tensor:
        """Temperature, filters and noise on the rows that sample; greedy rows stay."""
        chosen = _select(rows, lambda row: not row.params.greedy)
        if not chosen:
            return logits
        params = [rows[i].params for i in chosen]
        device = logits.device
        temperature = logits.new_tensor([p.temperature for p in params])
        limits = FilterParams(
            top_k=torch.tensor([p.top_k or self._vocab_size for p in params], device=device),
            top_p=logits.new_tensor([p.top_p for p in params]),
            min_p=logits.new_tensor([p.min_p for p in params]),
        )
        keys = [noise_keys(rows[i].params.seed, rows[i].position) for i in chosen]
        scores = filter_logits(logits[chosen] / temperature[:, None], limits)
        noise = gumbel_noise(torch.tensor(keys, device=device), self._noise_ids.to(device))
        scores = scores + noise
        return logits.index_copy(0, torch.tensor(chosen, device=device), scores)

    def _count(self, token_ids: list[int]) -> Tensor:
        """How often the token of each column occurs, [V]."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        counts = torch.bincount(ids, minlength=self._vocab_size)
        return counts if self._columns is None else counts[self._token_ids.cpu()]


def _select(rows: Many[ChoiceRow], wanted: Callable[[ChoiceRow], bool]) -> list[int]:
    return [index for index, row in enumerate(rows) if wanted(row)]


def _has_penalty(row: ChoiceRow) -> bool:
    p = row.params
    return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)


def _logprobs(logits: Tensor, token_ids: Tensor, rows: Many[ChoiceRow]) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that asked, from the unprocessed logits, by row."""
    asked = {i: row.params.num_logprobs for i, row in enumerate(rows)}
    wanted = {i: count for i, count in asked.items() if count is not None}
    if not wanted:
        return {}
    chosen = list(wanted)
    logprobs = logits[chosen].log_softmax(dim=-1)
    own_ids = token_ids[chosen]
    own = logprobs.gather(1, own_ids[:, None])[:, 0]
    best = logprobs.topk(max(wanted.values()), dim=-1)
    table = zip(
        own_ids.tolist(), own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )
    return {
        row: TokenLogprobs(token, logprob, list(zip(ids, values, strict=True))[: wanted[row]])
        for row, (token, logprob, ids, values) in zip(chosen, table, strict=True)
    }
