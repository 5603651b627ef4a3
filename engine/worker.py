"""The engine's own process: drain the inbox, step, post the report.

Started by the server as `python -m adaflash.engine.worker INBOX OUTBOX` with the EngineConfig as
one JSON line on standard input; standard input then stays open, and its end means that the server
is gone.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec
import zmq

from adaflash.engine.build import build_engine
from adaflash.engine.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.errors import EngineError
from adaflash.engine.messages import Abort, EngineFailed, EngineReady, Submit, ToEngine, ToServer

IDLE_POLL_MS = 1000


class Mailbox:
    """The worker's two sockets: messages in, messages out."""

    def __init__(self, inbox: str, outbox: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)  # never block or drop: the server bounds what is in flight
        self._inbox.connect(inbox)
        self._outbox.connect(outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def post(self, message: ToServer) -> None:
        self._outbox.send(self._encoder.encode(message))

    def drain(self, *, wait: bool) -> list[ToEngine]:
        """All messages that are there; with `wait`, up to a second for the first."""
        messages: list[ToEngine] = []
        timeout = IDLE_POLL_MS if wait else 0
        while self._inbox.poll(timeout):
            messages.append(self._decoder.decode(self._inbox.recv()))
            timeout = 0
        return messages

    def close(self) -> None:
        """Let what was posted go out."""
        self._inbox.close()
        self._outbox.close(linger=1000)


def serve(engine: Engine, mailbox: Mailbox) -> NoReturn:
    """Step while there is work, wait while there is none. Ends with the process."""
    while True:
        if not engine.has_work:
            engine.rest()
        for message in mailbox.drain(wait=not engine.has_work):
            match message:
                case Submit(request):
                    engine.add(request)
                case Abort(request_id):
                    engine.abort(request_id)
        if engine.has_work:
            mailbox.post(engine.step())
        news = engine.turn()
        if news is not None:
            mailbox.post(news)


def main() -> int:
    # Signals to the whole group (Ctrl-C, a service manager) are for the server, which drains first
    # and then ends this process; if the server dies, standard input ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    mailbox = Mailbox(sys.argv[1], sys.argv[2])
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    stdin = sys.stdin.fileno()
    closing = list[Callable[[], None]]()  # what to do first when the server is gone
    threading.Thread(target=_exit_with_server, args=(stdin, closing), daemon=True).start()
    try:
        engine, facts = build_engine(config)
        closing.append(engine.close)
        mailbox.post(EngineReady(facts))
        serve(engine, mailbox)
    except EngineError as error:
        return _give_up(mailbox, str(error))
    except Exception as error:  # noqa: BLE001 - told to the server, which restarts us
        traceback.print_exc()
        return _give_up(mailbox, f"{type(error).__name__}: {error}")


def _give_up(mailbox: Mailbox, reason: str) -> int:
    mailbox.post(EngineFailed(reason))
    mailbox.close()
    return 1


def _exit_with_server(stdin: int, closing: list[Callable[[], None]]) -> None:
    """stdin: a file descriptor; not the buffered file, which the interpreter locks at its end."""
    while os.read(stdin, 1):
        pass
    try:
        for close in closing:
            close()
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
