"""From prompts to choices: what chat and text completions, streamed or whole, have in common."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from adaflash.engine.errors import EngineDownError, QueueFullError
from adaflash.engine.messages import TokenDelta
from adaflash.engine.types import FinishReason, Request, SamplingParams, TokenLogprobs
from adaflash.server.context import AppContext
from adaflash.server.engine_client import TokenStream
from adaflash.server.errors import GenerationFailedError, ShuttingDownError, look_up
from adaflash.server.metrics import Metrics
from adaflash.server.sampling import seed_of_choice
from adaflash.server.text import TextStream


@dataclass(frozen=True)
class Job:
    """One HTTP request's work: every prompt is answered `num_choices` times."""

    request_id: str
    arrival_s: float  # on time.monotonic()'s clock
    prompts: Sequence[list[int]]
    sampling: SamplingParams
    stop: Sequence[str]
    num_choices: int
    priority: int
    return_speculation: bool = False
    may_learn: bool = True  # whether its texts may be kept for training


@dataclass
class SpeculationReport:
    """What speculation did for one choice, a decode step at a time."""

    verify_lengths: list[int] = field(default_factory=list)  # drafts verified
    accepted: list[int] = field(default_factory=list)  # of them, accepted and kept

    def as_json(self) -> dict[str, object]:
        # Each step also brings one token of the target's. No steps, no mean.
        steps = len(self.accepted)
        return {
            "verify_lengths": self.verify_lengths,
            "accepted": self.accepted,
            "mean_accepted_length": sum(self.accepted) / steps + 1 if steps else None,
        }


@dataclass(frozen=True)
class ChoiceDelta:
    """What is new in one choice. The last one of a choice has the finish reason."""

    index: int  # of the choice; choices of the second prompt follow those of the first
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    speculation: SpeculationReport | None = None  # with the last one, if asked for


@dataclass
class Usage:
    """Tokens of the whole HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Generation:
    """A job in the engine. Iterate it once, and close it whatever happens."""

    choices: list["_Choice"]
    usage: Usage

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """Deltas of all choices as they come. Raises what ended the job early."""
        queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(choice, queue)) for choice in self.choices]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Abort what still runs. Harmless at the end."""
        for choice in self.choices:
            choice.close()


def start(job: Job, context: AppContext) -> Generation:
    """Submit a job. Raises QueueFullError or EngineDownError if the engine does not take it."""
    unique = uuid.uuid4().hex[:8]  # a client may use one X-Request-Id for several requests
    requests = [
        Request(
            request_id=f"{job.request_id}-{unique}-{prompt_number}-{choice}",
            prompt_ids=prompt,
            sampling=msgspec.structs.replace(
                job.sampling, seed=seed_of_choice(job.sampling.seed, choice)
            ),
            priority=job.priority,
            arrival_s=job.arrival_s,
            may_learn=job.may_learn,
        )
        for prompt_number, prompt in enumerate(job.prompts)
        for choice in range(job.num_choices)
    ]
    streams = context.engine.submit(requests)
    usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
    choices = []
    for index, (request, stream) in enumerate(zip(requests, streams, strict=True)):
        text = TextStream(context.tokenizer, job.stop, min_tokens=job.sampling.min_tokens)
        record = _Record(context.metrics, request, counts_prompt=index % job.num_choices == 0)
        report = SpeculationReport() if job.return_speculation else None
        choices.append(_Choice(index, stream, text, record, usage, report))
    return Generation(choices, usage)


@contextlib.contextmanager
def counting_rejections(metrics: Metrics) -> Iterator[None]:
    """Count work that is turned away before it starts: full, draining, or no engine."""
    try:
        yield
    except (QueueFullError, ShuttingDownError, EngineDownError) as error:
        metrics.count_rejection(look_up(error).code or "other")
        raise


async def _pump(choice: "_Choice", queue: "asyncio.Queue[ChoiceDelta | Exception | None]") -> None:
    try:
        async for delta in choice:
            queue.put_nowait(delta)
        queue.put_nowait(None)
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
        queue.put_nowait(error)


@dataclass
class _Record:
    """The metrics of one engine request."""

    metrics: Metrics
    request: Request
    counts_prompt: bool  # of several choices only the first counts the prompt
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    ended: bool = False

    def on_tokens(self, delta: TokenDelta, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_s is None:
            self._on_first(delta, now)
        else:
            for _ in range(num_tokens):  # a delta may bring several: they share its gap
                self.metrics.inter_token.observe((now - self.last_s) / num_tokens)
        self.num_tokens += num_tokens
        self.last_s = now
        self.metrics.generation_tokens.inc(num_tokens)
        if delta.num_drafts is not None:
            num_kept = _num_kept_drafts(delta, num_tokens)
            self.metrics.speculation.on_decode_row(delta.num_drafts, num_kept, delta.drafted_by)

    def _on_first(self, delta: TokenDelta, now: float) -> None:
        self.first_s = now
        self.metrics.first_token.observe(now - self.request.arrival_s)
        if delta.queue_s is not None:
            self.metrics.queue_time.observe(delta.queue_s)
        if self.counts_prompt:
            self.metrics.prompt_tokens.inc(len(self.request.prompt_ids))
            self.metrics.prompt_tokens_cached.inc(delta.num_cached_tokens or 0)

    def end(self, reason: str) -> None:
        """Count the end of the request, the first time this is called."""
        if self.ended:
            return
        self.ended = True
        self.metrics.count_end(reason)
        if self.first_s is not None and reason in ("stop", "length"):
            self.metrics.whole.observe(self.last_s - self.request.arrival_s)
            self.metrics.request_prompt.observe(len(self.request.prompt_ids))
            self.metrics.request_generation.observe(self.num_tokens)
            if self.num_tokens > 1:
                mean = (self.last_s - self.first_s) / (self.num_tokens - 1)
                self.metrics.per_token.observe(mean)


class _Choice:
    """One choice: an engine request and its text."""

    def __init__(
        self,
        index: int,
        stream: TokenStream,
        text: TextStream,
        record: _Record,
        usage: Usage,
        report: SpeculationReport | None,
    ) -> None:
        self._index = index
        self._stream = stream
        self._text = text
        self._record = record
        self._usage = usage
        self._report = report

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """Raises EngineDownError, ShuttingDownError or GenerationFailedError."""
        try:
            async for delta in self._stream:
                self._check(delta)
                new = self._take(delta)
                if new.finish_reason is not None:
                    self._stream.abort()  # after a stop string the engine would go on
                    self._record.end(new.finish_reason)
                yield new
                if new.finish_reason is not None:
                    return
        except EngineDownError:
            self._record.end("error")
            raise

    def close(self) -> None:
        """Give up what still runs, and count it as aborted. Harmless at the end."""
        self._stream.abort()
        self._record.end("abort")

    def _check(self, delta: TokenDelta) -> None:
        if delta.finish_reason is FinishReason.ABORT:
            raise ShuttingDownError("the server is shutting down and gave this request up")
        if delta.finish_reason is FinishReason.ERROR:
            self._record.end("error")
            raise GenerationFailedError(f"the engine could not go on: {delta.error}")

    def _take(self, delta: TokenDelta) -> ChoiceDelta:
        token_ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]  # the token that ended it counts, but is no text
        piece = self._text.push(token_ids)
        text, stop = piece.text, piece.stop
        num_tokens = len(delta.token_ids) if stop is None else piece.num_tokens
        logprobs = (delta.logprobs or [])[: piece.num_tokens]
        if stop is None and delta.finish_reason is not None:
            rest = self._text.finish()
            text, stop = text + rest.text, rest.stop
        if delta.num_cached_tokens is not None and self._record.counts_prompt:
            self._usage.cached_tokens += delta.num_cached_tokens
        self._usage.completion_tokens += num_tokens
        self._record.on_tokens(delta, num_tokens)
        if self._report is not None and delta.num_drafts is not None:
            self._report.verify_lengths.append(delta.num_drafts)
            self._report.accepted.append(_num_kept_drafts(delta, num_tokens))
        finish_reason: FinishReason | None = delta.finish_reason
        stop_reason: str | int | None = delta.stop_token_id
        if stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop
        report = self._report if finish_reason is not None else None
        return ChoiceDelta(self._index, text, logprobs, finish_reason, stop_reason, report)


def _num_kept_drafts(delta: TokenDelta, num_tokens: int) -> int:
    """Accepted drafts among the first `num_tokens` of a delta: a stop string may cut the rest."""
    return min(delta.num_accepted, num_tokens)
