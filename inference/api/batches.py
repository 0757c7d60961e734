"""`/v1/batches`: create, list, retrieve, cancel."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.files import page_of
from inference.models import Batch
from inference.schemas.batches import BatchObject, BatchPage, BatchRequest, batch_object
from inference.schemas.queries import PageQuery
from inference.services import batches as service
from tenants.principal import Scope


@endpoint("POST", scope=Scope.INFERENCE, body=BatchRequest, answer=BatchObject, errors=(404,))
async def _create(call: ApiCall) -> HttpResponse:
    """Runs the lines of a file as requests of the batch tier."""
    asked = call.read(BatchRequest)
    return call.respond(batch_object(await sync_to_async(service.create_batch)(call.principal, asked)))


@endpoint("GET", scope=Scope.INFERENCE, query=PageQuery, answer=BatchPage)
async def _list(call: ApiCall) -> HttpResponse:
    """The batches, newest first."""
    rows = Batch.objects.filter(tenant_id=call.principal.tenant_id)
    return call.respond(await sync_to_async(page_of)(call.query(PageQuery), rows, "batch_id", batch_object))


@endpoint("GET", scope=Scope.INFERENCE, answer=BatchObject, errors=(404,))
async def batch(call: ApiCall, *, batch_id: str) -> HttpResponse:
    """How far a batch has come."""
    return call.respond(batch_object(await sync_to_async(service.find_batch)(call.principal, batch_id)))


@endpoint("POST", scope=Scope.INFERENCE, answer=BatchObject, errors=(404,))
async def cancel_batch(call: ApiCall, *, batch_id: str) -> HttpResponse:
    """Ends it; what has ended by then is in its files."""
    return call.respond(batch_object(await sync_to_async(service.cancel_batch)(call.principal, batch_id)))


batches = by_method(GET=_list, POST=_create)
