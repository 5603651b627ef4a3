"""What the OpenAPI document says of answers beside the good one."""

from pydantic import BaseModel

from adaflash.server.responses import ErrorResponse

Documented = dict[int | str, dict[str, object]]

REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed.",
    503: "The engine is down, or the server is shutting down; see Retry-After.",
}


def errors(*statuses: int) -> Documented:
    return {status: {"model": ErrorResponse, "description": REASONS[status]} for status in statuses}


def generation_responses(answer: type[BaseModel]) -> Documented:
    """A whole answer or a stream of events, and every error that generating can meet."""
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    good: Documented = {200: {"model": answer, "content": stream}}
    return good | errors(400, 401, 404, 429, 500, 503)
