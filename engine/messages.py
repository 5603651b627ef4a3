"""What crosses the process boundary between server and engine, as msgpack (msgspec).

server -> engine: Submit, Abort.  engine -> server: EngineReady once, then one StepReport a step;
if it learns, a LearningReport now and then; EngineFailed is the last word of a worker that cannot
go on.
"""

import enum

import msgspec

from adaflash.engine.types import FinishReason, Request, TokenLogprobs


class Submit(msgspec.Struct, tag="submit", frozen=True):
    request: Request


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request and free its pages. Unknown or ended ids are ignored."""

    request_id: str


ToEngine = Submit | Abort


class SpeculationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine speculates, or why it does not."""

    policy: str  # "off", "fixed:7", "threshold" or "goodput", as it is in force
    why_off: str | None = None  # if it was asked for and is off all the same
    drafter: str | None = None  # name of the drafter; None when there is none or it is off
    head: str | None = None  # what estimates the lengths
    block_size: int = 0  # tokens of a whole block, the newest known one included
    widths: list[int] = []  # block sizes that it drafts
    lookup_drafts: int = 0  # drafts of a request that are looked up at most; 0 = none are


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found out while starting."""

    pid: int
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    num_pages: int
    page_size: int  # tokens
    dtype: str
    device: str
    num_threads: int
    attention: str  # name of the chosen attention backend
    load_s: float
    speculation: SpeculationFacts = SpeculationFacts(policy="off")

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_pages * self.page_size


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    facts: EngineFacts


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The worker could not start or cannot go on."""

    error: str


class DraftedBy(enum.StrEnum):
    """Where drafts come from."""

    DRAFTER = "drafter"
    LOOKUP = "lookup"  # they stood in known text


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request; several when drafts were accepted, none when it only ends.

    Every submitted request ends in exactly one delta with a finish reason.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = (
        None  # the requested stop token that ended it, if not end-of-sequence
    )
    num_cached_tokens: int | None = None  # with the first delta
    queue_s: float | None = None  # with the first delta: from arrival to first scheduled
    error: str | None = None  # with FinishReason.ERROR
    num_drafts: int | None = None  # drafts verified for these tokens; None after a prompt
    num_accepted: int = 0  # of `token_ids`, the leading ones that were drafts
    drafted_by: DraftedBy | None = None  # None without drafts


class NoDraft(enum.StrEnum):
    """Why the drafter drafted nothing in a step with decoding rows."""

    OFF = "off"  # the policy, or there is no drafter
    NO_GAIN = "no_gain"  # it would not pay at this load
    LOOKUP = "lookup"  # what was looked up promises more
    NO_ROOM = "no_room"  # no pages or tokens are left for drafts, or all requests end anyway


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """The speculative side of one step that had decoding rows."""

    width: int  # block size that was drafted; 0 = none
    no_draft: NoDraft | None = None  # why none
    is_probe: bool = False  # drafted only to see whether it pays
    is_full_width: bool = False  # verified whole blocks, for calibration
    is_paying: bool = False  # whether drafting is thought to pay: the state with hysteresis
    predicted_accepted: list[float] = []  # sum of survival over the verified drafts, by position
    predicted_s: float = 0.0  # cost of the step by the cost model; 0 without one
    observed_s: float = 0.0  # the same parts of the step by the clock


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers. Times in seconds, the rest counts."""

    step_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_running: int
    num_waiting: int
    num_pages_used: int  # referenced by running sequences
    num_pages: int
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache in this step
    num_prefix_hits: int  # of them, found
    num_preempted: int
    num_draft_tokens: int = 0  # verified besides the known tokens
    draft_s: float = 0.0  # drafter, head and budget
    verify_s: float = 0.0  # target
    sample_s: float = 0.0  # choosing tokens and accepting drafts
    speculation: SpeculationStats | None = None  # None without decoding rows


class StepReport(msgspec.Struct, tag="step", frozen=True):
    deltas: list[TokenDelta]
    stats: StepStats


class NotLearnt(enum.StrEnum):
    """Why the text of a finished request was not kept for training."""

    OPT_OUT = "opt_out"  # the request said so
    NOT_SAMPLED = "not_sampled"  # the settings take only a share
    REDACTED = "redacted"  # the redaction hook said so
    HOOK_FAILED = "hook_failed"  # the redaction hook raised, or returned no such text
    QUEUE_FULL = "queue_full"  # texts came faster than they could be written
    NOT_WRITTEN = "not_written"  # the disk did not take it


class LearningReport(msgspec.Struct, tag="learning", frozen=True, kw_only=True):
    """What is new of learning since the last report."""

    num_kept: int = 0  # texts written
    num_left_out: dict[NotLearnt, int] = {}
    buffer_bytes: int = 0  # of all kept texts, now
    version: str | None = None  # of the drafter in use, now; None: the one from the settings
    num_reloads: int = 0
    num_refused: int = 0  # versions that could not be used
    problems: list[str] = []  # for the log


ToServer = EngineReady | EngineFailed | StepReport | LearningReport
