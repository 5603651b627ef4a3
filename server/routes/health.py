"""What machines ask: /health, /ready, /version, /metrics."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from adaflash import __version__
from adaflash.engine.errors import EngineDownError
from adaflash.server.context import Context
from adaflash.server.responses import Status, Version
from adaflash.server.routes.documented import errors

router = APIRouter()


@router.get("/health", responses=errors(503))
async def health(context: Context) -> Status:
    """Live: the engine process is up."""
    context.check_alive()
    return Status(status="ok")


@router.get("/ready", responses=errors(503))
async def ready(context: Context) -> Status:
    """Ready: new work is taken, and steps advance while work waits."""
    context.check_accepting()
    context.check_alive()
    if not context.engine.is_advancing:
        raise EngineDownError("the engine has not finished a step for a while")
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    return Version(version=__version__)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(context: Context) -> Response:
    """Prometheus metrics."""
    return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)
