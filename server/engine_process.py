"""The real EngineClient: an engine in its own process, watched and restarted."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from adaflash.engine.config import EngineConfig
from adaflash.engine.errors import (
    EngineDownError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)
from adaflash.engine.messages import (
    Abort,
    EngineFacts,
    EngineFailed,
    LearningReport,
    StepReport,
    StepStats,
    Submit,
    TokenDelta,
)
from adaflash.engine.types import Request
from adaflash.server.engine_client import ENGINE_DOWN, TokenStream
from adaflash.server.worker_process import WorkerProcess

log = logging.getLogger(__name__)

STALL_S = 30.0  # no step for this long while work waits: not ready
QUEUE_RETRY_AFTER_S = 1
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # pauses before the first, second, ... restart
STEADY_S = 60.0  # a worker that lived this long starts the pauses anew


async def pause(seconds: float) -> None:
    """Between a death and the restart."""
    await asyncio.sleep(seconds)


class EngineObserver(Protocol):
    """Who wants to know how the engine fares: metrics, a log."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_engine_up(self, facts: EngineFacts) -> None: ...

    def on_engine_down(self) -> None: ...

    def on_learning(self, report: LearningReport) -> None: ...


class EngineProcess:
    """See EngineClient. When the process dies, its requests end with EngineDownError."""

    def __init__(
        self,
        config: EngineConfig,
        observers: Sequence[EngineObserver],
        *,
        max_queued_requests: int,
        environment: Mapping[str, str],
    ) -> None:
        self._config = config
        self._environment = environment
        self._observers = observers
        self._max_in_flight = config.max_num_seqs + max_queued_requests
        self._streams: dict[str, _Stream] = {}
        self._worker: WorkerProcess | None = None
        self._facts: EngineFacts | None = None  # None while down
        self._ready_s = self._last_progress_s = time.monotonic()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises EngineError if it cannot start."""
        try:
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the engine; requests still in flight end with EngineDownError."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._bury("the server is shutting down")

    def abort_all(self) -> None:
        """Give up every request in flight; each still gets its last delta."""
        for request_id in list(self._streams):
            self.abort(request_id)

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineDownError(ENGINE_DOWN)
        return self._facts

    @property
    def is_alive(self) -> bool:
        return self._facts is not None

    @property
    def is_advancing(self) -> bool:
        idle_s = time.monotonic() - self._last_progress_s
        return self.is_alive and (not self._streams or idle_s < STALL_S)

    def submit(self, requests: Sequence[Request]) -> list[TokenStream]:
        """Admit all of `requests` or none; see EngineClient."""
        if self._facts is None or self._worker is None:
            raise EngineDownError(ENGINE_DOWN)
        if len(requests) > self._max_in_flight:
            raise InvalidRequestError(
                f"prompts and choices make {len(requests)} requests, more than the "
                f"{self._max_in_flight} that this server takes in at all"
            )
        if len(self._streams) + len(requests) > self._max_in_flight:
            raise QueueFullError(
                f"{len(self._streams)} requests are in flight and the limit is "
                f"{self._max_in_flight}; try again later",
                retry_after_s=QUEUE_RETRY_AFTER_S,
            )
        if not self._streams:
            self._last_progress_s = time.monotonic()
        return [self._open(request, self._worker) for request in requests]

    def _open(self, request: Request, worker: WorkerProcess) -> "_Stream":
        worker.send(Submit(request))
        stream = _Stream(self, request.request_id)
        self._streams[request.request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """End one request; its pages are free within a step. Ended ones are ignored."""
        if request_id in self._streams and self._worker is not None:
            with contextlib.suppress(EngineDownError):  # then the request ends with the engine
                self._worker.send(Abort(request_id))

    async def _launch(self) -> None:
        self._worker = await WorkerProcess.start(self._config, self._environment)
        self._facts = await self._worker.ready()
        self._last_progress_s = self._ready_s = time.monotonic()
        for observer in self._observers:
            observer.on_engine_up(self._facts)

    async def _supervise(self) -> None:
        """Pass reports on; when the worker is gone, fail its requests and start another.

        The pauses grow with every death or failed start, and start anew after a steady life.
        """
        num_failures = 0
        while True:
            reason = await self._live()
            if self._facts is not None and time.monotonic() - self._ready_s >= STEADY_S:
                num_failures = 0
            log.error("the engine is down: %s", reason)
            await self._bury(reason)
            await pause(BACK_OFF_S[min(num_failures, len(BACK_OFF_S) - 1)])
            num_failures += 1

    async def _live(self) -> str:
        """One worker's life, launched first unless it runs already; returns why it ended."""
        try:
            if self._worker is None:
                await self._launch()
                log.warning("the engine is up again")
            return await self._pass_on()
        except EngineError as error:
            return str(error)
        except Exception as error:  # whatever it is, the engine has to come back
            log.exception("the engine's supervision failed")
            return f"{type(error).__name__}: {error}"

    async def _pass_on(self) -> str:
        """Hand reports to streams and observer until the worker is gone; returns why it went."""
        assert self._worker is not None
        reason = ""
        async for message in self._worker.messages():
            match message:
                case StepReport(deltas, stats):
                    self._last_progress_s = time.monotonic()
                    for observer in self._observers:
                        observer.on_step(stats)
                    for delta in deltas:
                        self._deliver(delta)
                case LearningReport():
                    for observer in self._observers:
                        observer.on_learning(message)
                case EngineFailed(error):
                    reason = error
        return reason or f"the process ended with status {self._worker.exit_status}"

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None:
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
            stream.put(delta)

    async def _bury(self, reason: str) -> None:
        """The worker is gone or has to go: end its requests, clean up."""
        worker, self._worker = self._worker, None
        if self._facts is not None:
            self._facts = None
            for observer in self._observers:
                observer.on_engine_down()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDownError(f"the engine stopped: {reason}"))
        if worker is not None:
            await worker.close()


class _Stream:
    """See TokenStream."""

    def __init__(self, process: EngineProcess, request_id: str) -> None:
        self._process = process
        self._request_id = request_id
        self._queue: asyncio.Queue[TokenDelta | EngineDownError] = asyncio.Queue()
        self._ended = False

    def put(self, item: TokenDelta | EngineDownError) -> None:
        self._queue.put_nowait(item)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDownError):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def abort(self) -> None:
        if not self._ended:
            self._process.abort(self._request_id)
