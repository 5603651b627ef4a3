"""The engine's core types: what a request asks, where a sequence stands, what one step does.

No tensors here: planning works on Python numbers, so that it can be tested in milliseconds.
"""

import enum
from dataclasses import dataclass, field

import msgspec


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence or a stop token id
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller went away or the server is shutting down
    ERROR = "error"  # the engine failed; `TokenDelta.error` says how


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Validated at the door (server/schemas.py), so always in range.

    `seed` keys the sampling noise together with the absolute position: the same seed gives the
    same text whatever else is in the batch. Every choice of an `n` request has its own.
    """

    seed: int  # 0 .. 2**64 - 1
    max_tokens: int  # >= 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 0 < top_p <= 1
    top_k: int | None = None  # >= 1; None = the whole vocabulary
    min_p: float = 0.0  # 0 .. 1
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # >= 0.01; over prompt and generated tokens
    logit_bias: dict[int, float] = {}  # -100 bans the token
    num_logprobs: int | None = None  # None = none; 0 = the chosen token's only; k = and the top k

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the server sent. Never changes."""

    request_id: str
    prompt_ids: list[int]  # >= 1 token
    sampling: SamplingParams
    priority: int = 0  # lower first; first come, first served inside
    arrival_s: float = 0.0  # time.monotonic() at the door; one clock for all processes of a host
    may_learn: bool = True  # whether its text may be kept for training, if the server does that


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, from the target's unprocessed logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the k most likely tokens, best first


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no pages (new, or preempted)
    RUNNING = "running"  # holds pages; prefilling or decoding
    FINISHED = "finished"  # its last delta is out; holds no pages


LEGAL_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclass(eq=False)
class Sequence:
    """One request on its way. Owned by the scheduler.

    Invariant: `0 <= num_committed < len(token_ids)`: the K/V of the first `num_committed` tokens
    is in the pages, and while decoding exactly one token, the newest, is not.
    """

    request: Request
    order: int  # arrival number: first come, first served inside a priority
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_committed: int = 0
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of the leading full pages of token_ids
    status: SequenceStatus = SequenceStatus.WAITING
    num_cached_tokens: int | None = None  # prompt tokens taken from the prefix cache, first time
    first_scheduled_s: float | None = None
    length_ratio: float | None = None  # the threshold rule's smoothed share of a block

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncommitted(self) -> int:
        return len(self.token_ids) - self.num_committed

    @property
    def rank(self) -> tuple[int, int]:
        """Scheduling order: smaller goes first, the largest is preempted first."""
        return (self.request.priority, self.order)

    def move_to(self, status: SequenceStatus) -> None:
        assert status in LEGAL_TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status


class RowKind(enum.Enum):
    PREFILL = "prefill"  # known tokens are computed; a token is chosen only if it reaches the end
    VERIFY = "verify"  # the newest token and its drafts; with zero drafts this is plain decoding


@dataclass(frozen=True)
class Row:
    """One piece of the target's work in a step: a run of known tokens of one sequence."""

    sequence: Sequence
    start: int  # position of the first token; equals the sequence's num_committed
    num_tokens: int
    kind: RowKind
    draft_slots: int = 0  # free slots behind its tokens; drafts need one each

    @property
    def reaches_end(self) -> bool:
        """Whether the row's last token is the sequence's newest, so that the next is chosen."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """The scheduler's whole decision for one step. No tensors: printable, testable."""

    rows: tuple[Row, ...]
    preempted: tuple[Sequence, ...] = ()
    draft_room: int = 0  # drafts that the step's token limit leaves room for

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def decoding(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind is RowKind.VERIFY)
