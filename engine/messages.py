"""What crosses the process boundary between server and engine, as msgpack (msgspec).

server -> engine: Submit, Abort.  engine -> server: EngineReady once, then one StepReport a step;
EngineFailed is the last word of a worker that cannot go on.
"""

import msgspec

from adaflash.engine.types import FinishReason, Request, TokenLogprobs


class Submit(msgspec.Struct, tag="submit", frozen=True):
    request: Request


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request and free its pages. Unknown or ended ids are ignored."""

    request_id: str


ToEngine = Submit | Abort


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

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_pages * self.page_size


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    facts: EngineFacts


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The worker could not start or cannot go on."""

    error: str


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


class StepReport(msgspec.Struct, tag="step", frozen=True):
    deltas: list[TokenDelta]
    stats: StepStats


ToServer = EngineReady | EngineFailed | StepReport
