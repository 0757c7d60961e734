"""`GET /v1/models` and `GET /v1/models/{id}`: what this key may use. Costs nothing."""

from __future__ import annotations

from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.errors import NotAllowed
from inference.models_served import ServedModel
from inference.schemas.answers import ModelList, ModelObject
from tenants.principal import Scope


@endpoint("GET", scope=Scope.INFERENCE)
async def list_models(call: ApiCall) -> HttpResponse:
    models = [model for model in await call.runtime.models.all() if call.principal.allows(model.card.model)]
    return call.respond(ModelList([_object(model) for model in models]))


@endpoint("GET", scope=Scope.INFERENCE)
async def retrieve_model(call: ApiCall, *, model_id: str) -> HttpResponse:
    if not call.principal.allows(model_id):
        raise NotAllowed(f"This key may not use '{model_id}'.", code="model_not_allowed", param="model")
    return call.respond(_object(await call.runtime.models.get(model_id)))


def _object(model: ServedModel) -> ModelObject:
    return ModelObject(
        id=model.card.model, created=model.first_seen_at, max_model_len=model.card.context_length
    )
