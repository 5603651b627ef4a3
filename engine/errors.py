"""Everything the engine raises on purpose.

AdaFlashError
├── RequestError            the caller's request cannot be served as asked (HTTP 4xx)
│   ├── InvalidRequestError     a value is wrong; `param` names it
│   └── QueueFullError          too many requests in flight; try again later
└── EngineError             the server cannot do what it should (HTTP 5xx)
    ├── CheckpointError         a model's files are missing, incomplete or not understood
    ├── ConfigError             settings that contradict each other or the machine
    └── EngineDownError         the engine process is not there
"""


class AdaFlashError(Exception):
    """Base of all errors raised on purpose."""


class RequestError(AdaFlashError):
    """The caller's request cannot be served as asked."""


class InvalidRequestError(RequestError):
    """A value in the request is wrong; `param` is the field's dotted name, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RequestError):
    """The bounded queue is full; the same request may pass after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(AdaFlashError):
    """The server cannot do what it should."""


class CheckpointError(EngineError):
    """A model's files are missing, incomplete or not understood."""


class ConfigError(EngineError):
    """Settings contradict each other or the machine."""


class EngineDownError(EngineError):
    """The engine process is not there: it died, or has not started yet."""
