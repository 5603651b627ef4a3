"""What every answer and chunk of one HTTP request has in common."""

import time
from dataclasses import dataclass

from fastapi import Request

from adaflash.server.context import AppContext
from adaflash.server.generate import Usage
from adaflash.server.middleware import USAGE, arrival_of, request_id_of

LEARN = "X-AdaFlash-Learn"  # anything but `on` keeps the request's texts from being learnt from


@dataclass(frozen=True)
class Envelope:
    """What every answer and chunk of one HTTP request says of it."""

    request_id: str
    arrival_s: float  # on time.monotonic()'s clock
    answer_id: str
    model: str
    created: int  # seconds since 1970
    may_learn: bool = True  # whether the texts may be kept for training

    def as_json(self, kind: str) -> dict[str, object]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def envelope(prefix: str, request: Request, model: str, context: AppContext) -> Envelope:
    """Raises ShuttingDownError while draining: no new work gets further than here."""
    context.check_accepting()
    request_id = request_id_of(request.scope)
    return Envelope(
        request_id,
        arrival_of(request.scope),
        f"{prefix}-{request_id}",
        model,
        int(time.time()),
        may_learn=request.headers.get(LEARN, "on").strip().lower() == "on",
    )


def log_usage(request: Request, usage: Usage) -> None:
    """Show the token counts in the request's log line, as they are when it ends."""
    request.scope["state"][USAGE] = usage
