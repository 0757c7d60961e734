"""A request's body, as the struct that it should be."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from django.http import HttpRequest

from inference.errors import UnsupportedMedia
from inference.schemas.reading import read_json

_Request = TypeVar("_Request", bound=msgspec.Struct)


def read_body(request: HttpRequest, kind: type[_Request]) -> _Request:
    """Raises InvalidRequest, UnsupportedMedia; django.core.exceptions.RequestDataTooBig."""
    content_type, _, parameters = request.headers.get("Content-Type", "").partition(";")
    if content_type.strip().lower() not in ("application/json", ""):
        raise UnsupportedMedia(
            f"Content-Type is '{content_type[:80]}': send the body as application/json.",
            code="unsupported_media_type",
        )
    charset = dict(_parameters(parameters)).get("charset", "utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia(
            f"The body's charset is '{charset[:40]}': send UTF-8.", code="unsupported_media_type"
        )
    refuse_encoded(request)
    return read_json(request.body, kind)


def refuse_encoded(request: HttpRequest) -> None:
    """Raises UnsupportedMedia: a compressed body is not unpacked here."""
    encoding = request.headers.get("Content-Encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedMedia(
            f"Content-Encoding is '{encoding[:80]}': send the body as it is, without one.",
            param="Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )


def _parameters(text: str) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in text.split(";"))
    return [(name.strip().lower(), value.strip().strip('"').lower()) for name, _, value in pairs]
