"""GET /v1/models."""

from fastapi import APIRouter

from adaflash.server.context import AppContext, Context
from adaflash.server.responses import Model, ModelList
from adaflash.server.routes.documented import errors

router = APIRouter()


@router.get("/v1/models", responses=errors(401, 503))
async def list_models(context: Context) -> ModelList:
    """Every name that requests may use."""
    names = context.options.served_model_names
    return ModelList(object="list", data=[_describe(name, context) for name in names])


@router.get("/v1/models/{model_id:path}", responses=errors(400, 401, 404, 503))
async def get_model(model_id: str, context: Context) -> Model:
    """One of them."""
    return _describe(context.model_name(model_id), context)


def _describe(name: str, context: AppContext) -> Model:
    return Model(
        id=name,
        object="model",
        created=context.created,
        owned_by="adaflash",
        root=context.options.served_model_names[0],
        max_model_len=context.engine.facts.max_model_len,
    )
