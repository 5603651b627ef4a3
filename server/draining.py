"""An HTTP server that keeps answering while the work in flight ends."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from adaflash.server.lifecycle import Lifecycle

FLUSH_TIMEOUT_S = 5  # for the last bytes of answers, once the work has ended
HURRIED_FLUSH_TIMEOUT_S = 1


class DrainingServer(uvicorn.Server):
    """uvicorn, stopped in two stages by `stop`, which is meant as a signal handler.

    At first, `lifecycle.draining` is set: the app refuses new work, and once no request is being
    answered, the server ends. After `drain_timeout_s` it calls `abort_work` and ends all the same.
    """

    def __init__(
        self,
        app: FastAPI,
        lifecycle: Lifecycle,
        *,
        abort_work: Callable[[], None],
        drain_timeout_s: float,
        on_listening: Callable[[], None],
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,  # server/logs.py sees to it
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
        )
        super().__init__(config)
        self._lifecycle = lifecycle
        self._abort_work = abort_work
        self._drain_timeout_s = drain_timeout_s
        self._on_listening = on_listening
        self.was_hurried = False  # told to stop again, before the work had ended
        self._deadline_s: float | None = None  # on the loop's clock; None until told to stop

    def stop(self) -> None:
        """Drain; the second time, abort what is left and end."""
        if self._deadline_s is None:
            self._lifecycle.draining = True
            self._deadline_s = asyncio.get_running_loop().time() + self._drain_timeout_s
        else:
            self.was_hurried = True
            self._deadline_s = 0
            self.config.timeout_graceful_shutdown = HURRIED_FLUSH_TIMEOUT_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to leave the main loop."""
        if self._deadline_s is not None:
            # HTTP requests, not engine requests: those still being tokenised count as well.
            expired = asyncio.get_running_loop().time() >= self._deadline_s
            if expired and self.server_state.tasks:
                self._abort_work()
            self.should_exit |= expired or not self.server_state.tasks
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would stop listening at the first signal; whoever runs us
        connects signals to `stop`.
        """
        yield
