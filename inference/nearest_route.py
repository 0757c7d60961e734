"""What a program meant that asks for an address of the API that there is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from django.urls import Resolver404, URLPattern, URLResolver, get_resolver, resolve
from django.urls.resolvers import RoutePattern

_PREFIXES: Final = ("/v1", "/operator")
_ALIKE: Final = 0.8
_LONGEST: Final = 200
_PLACE: Final = re.compile(r"<(?:\w+:)?\w+>")


def lacks_its_base(path: str) -> bool:
    """Whether it would be a route of the API behind `/v1`, or from a later `/v1` on: a base URL is at fault."""
    return not _is_below_prefix(_segments(path)) and _with_base(path) is not None


@lru_cache(maxsize=256)
def nearest_route(path: str) -> str | None:
    """Not for a redirect: a POST would arrive as a GET."""
    if len(path) > _LONGEST:
        return None
    segments = _segments(path)
    plain = _joined(segments)
    if plain != path and _is_route(plain):
        return plain
    return _with_base(path) or _most_alike(segments)


def _with_base(path: str) -> str | None:
    segments = _segments(path)
    tails = [segments[at:] for at in range(1, len(segments)) if segments[at] == "v1"]
    if not _is_below_prefix(segments):
        tails.append(["v1", *segments])
    return next((found for tail in tails if _is_route(found := _joined(tail))), None)


def _most_alike(segments: Sequence[str]) -> str | None:
    """By their words: what stands in a place for an id says nothing."""
    if not _is_below_prefix(segments):
        return None
    best, most = None, _ALIKE
    for route in _routes():
        places = [index for index, part in enumerate(route) if _PLACE.fullmatch(part)]
        if places and len(route) != len(segments):
            continue
        asked = ["*" if index in places else part for index, part in enumerate(segments)]
        alike = difflib.SequenceMatcher(
            None,
            _joined(asked),
            _joined("*" if index in places else part for index, part in enumerate(route)),
        )
        if alike.real_quick_ratio() > most and alike.quick_ratio() > most and alike.ratio() > most:
            most = alike.ratio()
            best = _joined(segments[index] if index in places else part for index, part in enumerate(route))
    return best


def _is_route(path: str) -> bool:
    try:
        # What takes the rest has no name.
        return _is_below_prefix(_segments(path)) and resolve(path).url_name is not None
    except Resolver404:
        return False


def _is_below_prefix(segments: Sequence[str]) -> bool:
    return bool(segments) and f"/{segments[0]}" in _PREFIXES


def _segments(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _joined(segments: Any) -> str:
    return "/" + "/".join(segments)


@cache
def _routes() -> tuple[tuple[str, ...], ...]:
    found = (_segments(route) for route in _named(get_resolver().url_patterns, ""))
    return tuple(tuple(route) for route in found if _is_below_prefix(route))


def _named(patterns: Sequence[URLPattern | URLResolver], before: str) -> Iterator[str]:
    for each in patterns:
        if not isinstance(each.pattern, RoutePattern):
            continue
        route = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from _named(each.url_patterns, route)
        elif each.name:
            yield route
