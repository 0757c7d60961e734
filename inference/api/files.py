"""`/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, SuspiciousOperation
from django.db.models import Model, QuerySet
from django.http import HttpResponse
from django.http.multipartparser import MultiPartParserError

from inference.api.body import refuse_encoded
from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.errors import InvalidRequest, UnsupportedMedia
from inference.schemas.batches import Deleted, FileObject, FilePage, FileUpload, Page, file_object
from inference.schemas.queries import FilesQuery, PageQuery
from inference.services import files as service
from tenants.principal import Scope

_EXPIRES_S = range(3600, 30 * 86400 + 1)


@endpoint("POST", scope=Scope.INFERENCE, form=FileUpload, answer=FileObject)
async def _upload(call: ApiCall) -> HttpResponse:
    """Keeps a file."""
    if not call.request.headers.get("Content-Type", "").lower().startswith("multipart/form-data"):
        raise UnsupportedMedia(
            "Upload a file as multipart/form-data with the fields 'file' and 'purpose'.",
            code="unsupported_media_type",
        )
    refuse_encoded(call.request)
    return call.respond(file_object(await sync_to_async(_uploaded)(call)))


def _uploaded(call: ApiCall) -> Any:
    try:
        form, uploads = call.request.POST, call.request.FILES
    except (MultiPartParserError, BadRequest, SuspiciousOperation, ValueError) as error:
        raise InvalidRequest(
            "The body is no valid multipart/form-data: send it with the fields 'file' and 'purpose'."
        ) from error
    if form.get("purpose") != "batch":
        raise InvalidRequest("'purpose' must be 'batch'.", param="purpose")
    upload = uploads.get("file")
    if upload is None or isinstance(upload, list):
        raise InvalidRequest("'file' is missing: add it to the form.", param="file")
    seconds = form.get("expires_after[seconds]")
    if seconds is not None and not (
        seconds.isascii() and seconds.isdecimal() and int(seconds[:9]) in _EXPIRES_S
    ):
        raise InvalidRequest("'expires_after[seconds]' must be from 3600 to 2592000.", param="expires_after")
    return service.upload_file(
        call.principal,
        filename=upload.name or "file",
        content=upload.read(),
        expires_after_s=None if seconds is None else int(seconds),
    )


@endpoint("GET", scope=Scope.INFERENCE, query=FilesQuery, answer=FilePage)
async def _list(call: ApiCall) -> HttpResponse:
    """The files, newest first."""
    asked = call.query(FilesQuery)
    rows = service.live_files(call.principal.tenant_id)
    if asked.purpose:
        rows = rows.filter(purpose=asked.purpose)
    return call.respond(await sync_to_async(page_of)(asked, rows, "file_id", file_object))


@endpoint("GET", scope=Scope.INFERENCE, answer=FileObject, errors=(404,))
async def _retrieve(call: ApiCall, *, file_id: str) -> HttpResponse:
    """What is known of a file."""
    return call.respond(file_object(await sync_to_async(service.find_file)(call.principal, file_id)))


@endpoint("DELETE", scope=Scope.INFERENCE, answer=Deleted, errors=(404,))
async def _delete(call: ApiCall, *, file_id: str) -> HttpResponse:
    """Deletes it."""
    await sync_to_async(service.delete_file)(call.principal, file_id)
    return call.respond(Deleted(file_id, "file"))


@endpoint("GET", scope=Scope.INFERENCE, answer=bytes, errors=(404,))
async def file_content(call: ApiCall, *, file_id: str) -> HttpResponse:
    """What is in it."""
    content = await sync_to_async(service.read_file)(call.principal, file_id)
    return HttpResponse(content, content_type="application/octet-stream")


files = by_method(GET=_list, POST=_upload)
file = by_method(GET=_retrieve, DELETE=_delete)


def page_of(asked: PageQuery, rows: QuerySet[Any], id_field: str, render: Any) -> Page:
    """Newest first unless `order` is `asc`; after the object `after`, at most `limit`. Raises InvalidRequest."""
    is_ascending = asked.order == "asc"
    if asked.after:
        last: Model | None = rows.filter(**{id_field: asked.after}).first()
        if last is None:
            raise InvalidRequest(
                "'after' names nothing of yours: give the last id of the page before.", param="after"
            )
        rows = rows.filter(**{"pk__gt" if is_ascending else "pk__lt": last.pk})
    found = list(rows.order_by("id" if is_ascending else "-id")[: asked.limit + 1])
    shown = [render(row) for row in found[: asked.limit]]
    return Page(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > len(shown),
    )
