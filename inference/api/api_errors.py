"""Whatever goes wrong below a view, as the error that its client hears."""

from __future__ import annotations

import structlog
from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist, RequestDataTooBig, TooManyFieldsSent
from django.http.request import UnreadablePostError

from inference.errors import (
    ApiError,
    Conflict,
    InternalError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    TooLarge,
    Unauthenticated,
    UnsupportedMedia,
)
from inference.outages import outage
from tenants.auth import AuthError
from tenants.conflicts import is_conflict

log = structlog.get_logger(__name__)


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if (away := outage(error)) is not None:
        return away
    if isinstance(error, AuthError):
        kind = NotAllowed if error.status == 403 else Unauthenticated
        return kind(str(error), code=error.code)
    if is_conflict(error):
        return Conflict(
            "Something that this belongs to was changed at the same moment. Look again, then try again.",
            code="conflict",
        )
    if isinstance(error, ObjectDoesNotExist):
        # It was there a moment ago. Services say in words what is gone; this is for what they did not think of.
        log.warning("gone", what=type(error).__qualname__, exc_info=error)
        return NotFound(
            "What this is about was deleted at the same moment. Look again at what there is.",
            code="not_found",
        )
    if isinstance(error, RequestDataTooBig):
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        return TooLarge(f"The body is too large: send at most {most:,} bytes.", code="request_too_large")
    if isinstance(error, TooManyFieldsSent):
        most = settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
        return InvalidRequest(f"The query has more than {most:,} parameters: send fewer.")
    if isinstance(error, UnreadablePostError):
        return UnsupportedMedia("The body could not be read to its end. Send it again, whole.")
    log.exception("api_error")
    return InternalError()
