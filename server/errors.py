"""From errors to HTTP: one table, one body shape (OpenAI's nested one) for every route."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from adaflash.engine.errors import (
    AdaFlashError,
    EngineDownError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)

DOWN_RETRY_AFTER_S = 2  # while draining or restarting
MAX_SHOWN = 100  # characters of a client's value or name in a message


class RequestTooLargeError(InvalidRequestError):
    """The body is larger than the server takes."""


class ModelNotFoundError(RequestError):
    """No model of this name is served."""


class UnauthorizedError(RequestError):
    """The API key is missing or wrong."""


class ShuttingDownError(AdaFlashError):
    """The server takes no new work, or has given this work up, because it is shutting down."""


class GenerationFailedError(AdaFlashError):
    """The engine could not go on with a request."""


@dataclass(frozen=True)
class HttpError:
    """How a class of errors is answered."""

    status: int
    type: str
    code: str | None = None


INVALID = "invalid_request_error"
TABLE: dict[type[AdaFlashError], HttpError] = {
    RequestTooLargeError: HttpError(400, INVALID, "request_too_large"),
    InvalidRequestError: HttpError(400, INVALID),
    UnauthorizedError: HttpError(401, INVALID, "invalid_api_key"),
    ModelNotFoundError: HttpError(404, INVALID, "model_not_found"),
    QueueFullError: HttpError(429, "rate_limit_error", "queue_full"),
    ShuttingDownError: HttpError(503, "server_error", "shutting_down"),
    EngineDownError: HttpError(503, "server_error", "engine_down"),
}
INTERNAL = HttpError(500, "server_error", "internal_error")


def look_up(error: Exception) -> HttpError:
    """The row of the table for the error's class or its nearest base."""
    rows = (TABLE[base] for base in type(error).__mro__ if base in TABLE)
    return next(rows, INTERNAL)


def error_body(error: Exception) -> dict[str, object]:
    """The body for `error`; of an error not raised on purpose nothing is told."""
    row = look_up(error)
    message = str(error) if isinstance(error, AdaFlashError) else "internal server error"
    return body(message, row, getattr(error, "param", None))


def body(message: str, row: HttpError, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": row.type, "param": param, "code": row.code}}


def shorten(text: str) -> str:
    """The start of what a client sent, for a message."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def error_response(error: Exception) -> JSONResponse:
    """The whole answer for `error`."""
    row = look_up(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    elif row.status == 503:
        headers["Retry-After"] = str(DOWN_RETRY_AFTER_S)
    elif row.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), row.status, headers)


def install(app: FastAPI) -> None:
    """Answer every expected error of `app` in this shape; RequestLog answers the others."""

    async def on_own(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(explain(error.errors()))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        row = HttpError(error.status_code, INVALID if error.status_code < 500 else "server_error")
        return JSONResponse(body(str(error.detail), row), error.status_code, error.headers)

    app.add_exception_handler(AdaFlashError, on_own)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def explain(problems: Sequence[Mapping[str, object]]) -> InvalidRequestError:
    """One sentence for what pydantic found: of the tries at a union, the one that got furthest."""
    problem = max(problems, key=lambda p: (p["type"] in _SIZES, len(_path(p))))
    path = _path(problem)
    param = shorten(".".join(path)) or None
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unrecognized request argument supplied: {param}", param=param)
    if problem["type"] == "json_invalid":
        reason = _context(problem).get("error", message)
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if problem["type"] == "model_attributes_type" and not path:
        return InvalidRequestError(
            "the body must be a JSON object, sent with Content-Type: application/json"
        )
    if problem["type"] in ("missing", "json_type") or not path:
        return InvalidRequestError(f"{param or 'body'}: {message}", param=param)
    shown = shorten(repr(problem.get("input")))
    return InvalidRequestError(f"{param}: {message} (got {shown})", param=param)


def _context(problem: Mapping[str, object]) -> Mapping[str, object]:
    context = problem.get("ctx")
    return context if isinstance(context, Mapping) else {}


def _path(problem: Mapping[str, object]) -> list[str]:
    """The field's path, without pydantic's names for the members of a union."""
    location = problem["loc"]
    assert isinstance(location, Iterable)
    parts = [part for part in location if part not in ("body", "query", "path")]
    return [
        str(part)
        for part in parts
        if isinstance(part, int) or (part.replace("_", "").isalnum() and part not in _TYPE_NAMES)
    ]


_SIZES = frozenset({"too_long", "too_short"})  # the right shape, so this is what is wrong
_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "nullable"})
