"""`/v1/usage/exports`: reports as files, for spans too long to page through."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import HttpResponse, QueryDict

from inference.api.actors import key_actor
from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.report_parameters import read_report
from inference.downloads import MEDIA_TYPES, export_response
from inference.errors import Conflict, NotFound, RateLimited
from inference.models import ExportFormat, ExportState, UsageExport
from inference.reports import Dimension
from inference.schemas.exports import ExportList, ExportObject, NewExport, export_object
from inference.services.exports import (
    ExportNotFound,
    TooManyExports,
    content_of,
    create_export,
    get_export,
    list_exports,
)
from tenants.models import Tenant
from tenants.principal import Scope


@endpoint("GET", scope=Scope.USAGE_READ, answer=ExportList)
async def _list(call: ApiCall) -> HttpResponse:
    """The tenant's reports as files."""
    rows = await sync_to_async(list_exports)(call.principal.tenant_id)
    return call.respond(ExportList([export_object(row) for row in rows]))


@endpoint("POST", scope=Scope.USAGE_READ, body=NewExport, answer=ExportObject, status=202, errors=(429,))
async def _create(call: ApiCall) -> HttpResponse:
    """Writes a report to a file, within seconds."""
    asked = call.read(NewExport)
    try:
        export = await sync_to_async(_created)(call, asked)
    except TooManyExports as error:
        raise RateLimited(
            f"{error}: ask again when one is done.", kind="requests", retry_after_ms=10_000
        ) from None
    return call.respond(export_object(export), status=202)


exports = by_method(GET=_list, POST=_create)


@endpoint("GET", scope=Scope.USAGE_READ, answer=ExportObject, errors=(404,))
async def retrieve(call: ApiCall, *, export_id: str) -> HttpResponse:
    """How far it is."""
    return call.respond(export_object(await _export(call, export_id)))


@endpoint("GET", scope=Scope.USAGE_READ, answer=bytes, media=tuple(MEDIA_TYPES.values()), errors=(404, 409))
async def content(call: ApiCall, *, export_id: str) -> HttpResponse:
    """The file."""
    export = await _export(call, export_id)
    file = await sync_to_async(content_of)(export)
    if file is None:
        raise Conflict(
            f"This export is {export.state}: it has no file. "
            + ("Ask for another." if export.state == ExportState.FAILED else "Look again in some seconds."),
            code="export_not_ready",
        )
    return export_response(export, file)


async def _export(call: ApiCall, export_id: str) -> UsageExport:
    try:
        return await sync_to_async(get_export)(call.principal.tenant_id, export_id)
    except ExportNotFound:
        raise NotFound(
            "There is no such export, or its week is over. GET /v1/usage/exports lists those that there are.",
            code="export_not_found",
        ) from None


def _created(call: ApiCall, asked: NewExport) -> UsageExport:
    parameters = QueryDict(mutable=True)
    parameters["bucket_width"], parameters["group_by"] = asked.bucket_width, ",".join(asked.group_by)
    for name in ("start", "end"):
        if (moment := getattr(asked, name)) is not None:
            parameters[name] = str(moment)
    for dimension in Dimension:
        parameters.setlist(dimension, getattr(asked, dimension))
    report = read_report(parameters, call.principal)
    return create_export(
        actor=key_actor(call),
        tenant=Tenant.objects.get(pk=call.principal.tenant_id),
        report=report,
        format=ExportFormat(asked.format),
    )
