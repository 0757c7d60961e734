"""`GET /v1/models` and `GET /v1/models/{id}`: what this key may use. Costs nothing."""

from __future__ import annotations

from dataclasses import replace

from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.models_served import ServedModel, visible_adapters
from inference.schemas.answers import ModelList, ModelObject
from inference.services.submit import may_not_use
from tenants.principal import Scope


@endpoint("GET", scope=Scope.INFERENCE, answer=ModelList)
async def list_models(call: ApiCall) -> HttpResponse:
    """The models that the key may use."""
    tenant = call.principal.tenant_public_id
    found: list[ServedModel] = []
    for model in await call.runtime.models.all(tenant):
        found += [model, *(replace(model, adapter=name) for name in visible_adapters(model.card, tenant))]
    allowed = [_object(model) for model in found if call.principal.allows(*model.names)]
    ids = [model.id for model in allowed]
    return call.respond(
        ModelList(data=allowed, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
    )


@endpoint("GET", scope=Scope.INFERENCE, answer=ModelObject, errors=(404,))
async def retrieve_model(call: ApiCall, *, model_id: str) -> HttpResponse:
    """One of them."""
    tenant = call.principal.tenant_public_id
    model = await call.runtime.models.get(model_id, tenant_public_id=tenant)
    if not call.principal.allows(*model.names):
        raise may_not_use(model_id)
    return call.respond(_object(model))


def _object(model: ServedModel) -> ModelObject:
    return ModelObject(
        id=model.asked_name,
        display_name=model.asked_name,
        created=model.first_seen_at,
        created_at=model.first_seen_at,
        max_model_len=model.card.context_length,
        max_input_tokens=model.card.context_length,
    )
