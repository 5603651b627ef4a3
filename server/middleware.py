"""Around every request: its id, its log line, its count. Plain ASGI, so that disconnects pass."""

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaflash.server.errors import error_response
from adaflash.server.logs import ACCESS, FIELDS
from adaflash.server.metrics import Metrics

log = logging.getLogger(__name__)
access_log = logging.getLogger(ACCESS)

REQUEST_ID = "X-Request-Id"
USAGE = "usage"  # in the request's state: generate.Usage, which still grows while a stream runs
CLIENT_LEFT = 499  # logged and counted as this when there was nobody left to answer
SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines


def request_id_of(scope: MutableMapping[str, object]) -> str:
    """The id that RequestLog gave to the request."""
    state = scope["state"]
    assert isinstance(state, dict)
    return str(state["request_id"])


def arrival_of(scope: MutableMapping[str, object]) -> float:
    """When the request came in, on time.monotonic()'s clock."""
    state = scope["state"]
    assert isinstance(state, dict)
    return float(state["arrival_s"])


class RequestLog:
    """Takes a well-formed X-Request-Id or makes one, echoes it, logs and counts the request.

    Answers unexpected errors, so that these answers too have the id and count as what they are.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        arrival_s, status = time.monotonic(), None
        scope.setdefault("state", {}).update(request_id=request_id, arrival_s=arrival_s)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("unexpected error on %s", quote(scope["path"]))
            if status is not None:
                raise  # too late for an answer: the connection breaks
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self._record(scope, status or CLIENT_LEFT, time.monotonic() - arrival_s)

    def _record(self, scope: Scope, status: int, elapsed_s: float) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "unmatched")  # no client-made labels
        self._metrics.count_http(endpoint, scope["method"], status)
        path = quote(scope["path"])  # no line breaks or escape codes of a client's in the log
        if path in QUIET and status < 400:
            return
        request_id = request_id_of(scope)
        tokens = _token_counts(scope)
        fields = {
            "request_id": request_id,
            "method": scope["method"],
            "path": path,
            "status": status,
            "elapsed_s": round(elapsed_s, 4),
            **tokens,
        }
        more = "".join(f" {name}={value}" for name, value in tokens.items())
        access_log.info(
            "%s %s %d %.3fs id=%s%s",
            *(scope["method"], path, status, elapsed_s, request_id, more),
            extra={FIELDS: fields},
        )


def _token_counts(scope: Scope) -> dict[str, int]:
    """What a generating route has used up by now; nothing for the others."""
    usage = scope["state"].get(USAGE)
    if usage is None:
        return {}
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
