"""The HTTP app: routes, errors and middleware put together."""

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from adaflash import __version__
from adaflash.server import errors
from adaflash.server.auth import require_key
from adaflash.server.context import AppContext
from adaflash.server.disconnects import ClientLeftError
from adaflash.server.middleware import RequestLog
from adaflash.server.routes import chat, completions, health, models, tokenize


def create_app(context: AppContext) -> FastAPI:
    """An app that answers with `context`'s engine; several can live in one process."""
    app = FastAPI(
        title="AdaFlash",
        version=__version__,
        summary="OpenAI-compatible LLM inference.",
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.context = context
    errors.install(app)
    app.add_exception_handler(ClientLeftError, _on_client_left)
    app.include_router(health.router)
    for resource in (chat, completions, models, tokenize):
        app.include_router(resource.router, dependencies=[Depends(require_key)])
    if context.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(context.options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestLog, metrics=context.metrics)
    return app


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; it shows in the log
