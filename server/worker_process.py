"""One engine process: its life, and the two sockets to it."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from adaflash.engine.config import EngineConfig
from adaflash.engine.errors import EngineDownError
from adaflash.engine.messages import (
    EngineFacts,
    EngineFailed,
    EngineReady,
    ToEngine,
    ToServer,
)

LAST_WORDS_S = 0.2  # how long to look for messages of a process that has exited
GRACE_S = 3.0  # for a process that is told to end: what it keeps may have to be written


class WorkerProcess:
    """A running engine process. Made by `start`; gone for good once it exits or is closed."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._was_ready = False
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        # Sending never waits (no high-water mark), so the plain socket will do.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._outbox = plain.socket(zmq.PUSH)
        for socket, name in ((self._inbox, "out"), (self._outbox, "in")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_address(folder, name))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)

    @classmethod
    async def start(cls, config: EngineConfig, environment: Mapping[str, str]) -> "WorkerProcess":
        """Start the process and hand it its settings; it is not ready yet.

        Raises OSError if the machine has no room for it.
        """
        folder = Path(tempfile.mkdtemp(prefix="adaflash-"))
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            command = (sys.executable, "-P", "-m", "adaflash.engine.worker")
            process = await asyncio.create_subprocess_exec(
                *command,
                _address(folder, "in"),
                _address(folder, "out"),
                stdin=subprocess.PIPE,
                env=environment,
            )
            undo.callback(process.kill)
            worker = cls(process, folder)
            undo.pop_all()  # all went well: `close` cleans up
        assert process.stdin is not None
        # Standard input stays open: its end tells the worker that this process is gone.
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.returncode

    async def ready(self) -> EngineFacts:
        """Wait until the model is loaded. Raises EngineDownError if it will not be."""
        async for message in self.messages():
            match message:
                case EngineReady(facts):
                    self._was_ready = True
                    return facts
                case EngineFailed(error):
                    raise EngineDownError(error)
        raise EngineDownError(f"the engine ended with status {self.exit_status} while starting")

    def send(self, message: ToEngine) -> None:
        """Never waits. Raises EngineDownError if the process is gone."""
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:  # nobody is connected, and queues have no limit
            raise EngineDownError("the engine has just stopped; it is being restarted") from error

    async def messages(self) -> AsyncIterator[ToServer]:
        """What the worker posts, until it has exited and its last words are read."""
        exited = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                receiving = asyncio.ensure_future(self._inbox.recv())
                await asyncio.wait({exited, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
                if not receiving.done():
                    receiving.cancel()
                    return
                yield self._decoder.decode(receiving.result())
        finally:
            exited.cancel()

    async def close(self) -> None:
        """End the process if it still runs, and clean up."""
        if self.is_alive and self._was_ready:
            await self._ask_to_end()
        if self.is_alive:
            self._process.kill()
        await self._process.wait()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _ask_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), GRACE_S)


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"
