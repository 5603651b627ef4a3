"""What the routes work with, handed to the app once when it is made."""

import time
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from adaflash.engine.errors import EngineDownError
from adaflash.server.engine_client import ENGINE_DOWN, EngineClient
from adaflash.server.errors import ModelNotFoundError, ShuttingDownError, shorten
from adaflash.server.lifecycle import Lifecycle
from adaflash.server.metrics import Metrics
from adaflash.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class AppOptions:
    """Limits and names."""

    served_model_names: tuple[str, ...]  # the first is the one shown
    api_keys: tuple[str, ...] = ()  # none: the API is open
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_choices: int = 16


@dataclass(frozen=True)
class AppContext:
    """One per app."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    lifecycle: Lifecycle
    options: AppOptions
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError for one that is not served."""
        names = self.options.served_model_names
        if asked is not None and asked not in names:
            raise ModelNotFoundError(
                f"the model {shorten(asked)!r} is not served here; served: {', '.join(names)}"
            )
        return asked or names[0]

    def check_accepting(self) -> None:
        """Raise ShuttingDownError while draining."""
        if self.lifecycle.draining:
            raise ShuttingDownError("the server is shutting down and takes no new requests")

    def check_alive(self) -> None:
        """Raise EngineDownError while the engine process is not up."""
        if not self.engine.is_alive:
            raise EngineDownError(ENGINE_DOWN)


def context_of(request: Request) -> AppContext:
    return cast(AppContext, request.app.state.context)


Context = Annotated[AppContext, Depends(context_of)]
