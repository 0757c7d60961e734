"""What a program meant that asks for an address of the API that there is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from django.urls import Resolver404, URLPattern, URLResolver, get_resolver, resolve
from django.urls.resolvers import RoutePattern

_PREFIXES: Final = ("/v1", "/operator")
_ALIKE: Final = 0.8
_LONGEST: Final = 200
_PLACE: Final = re.compile(r"<(?:\w+:)?\w+>")
_DOTS: Final = frozenset((".", ".."))


@dataclass(frozen=True, slots=True)
class _Route:
    parts: tuple[str, ...]
    methods: frozenset[str]


def has_dots(path: str) -> bool:
    """Whether it leads over `.` or `..`, which no server resolves for its client."""
    return "/." in path and not _DOTS.isdisjoint(path.split("/"))


def lacks_its_base(path: str) -> bool:
    """Whether it would be a route of the API behind `/v1`, or from a later `/v1` on: a base URL is at fault."""
    segments = _segments(path)
    return not _is_below_prefix(segments) and any(
        _methods_at(with_base) for with_base in _with_base(segments)
    )


@lru_cache(maxsize=256)
def nearest_route(method: str, path: str) -> str | None:
    """One that takes that method. Not for a redirect: a POST would arrive as a GET."""
    if len(path) > _LONGEST:
        return None
    segments = _segments(path)
    for meant in (_joined(segments), *_with_base(segments)):
        if meant != path and _takes(_methods_at(meant), method):
            return meant
    return _most_alike(method, segments)


def _with_base(segments: Sequence[str]) -> Iterator[str]:
    begins = [at for at, part in enumerate(segments) if part.lower() == "v1"]
    yield from (_joined(("v1", *segments[at + 1 :])) for at in begins)
    if not _is_below_prefix(segments):
        yield _joined(("v1", *segments))


def _most_alike(method: str, segments: Sequence[str]) -> str | None:
    """By their words: what stands in a place for an id says nothing."""
    if not _is_below_prefix(segments):
        return None
    best, most = None, _ALIKE
    for each in _routes():
        if not _takes(each.methods, method):
            continue
        route = each.parts
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


def _methods_at(path: str) -> frozenset[str]:
    """Empty where it is no route of the API."""
    try:
        match = resolve(path) if _is_below_prefix(_segments(path)) else None
    except Resolver404:
        match = None
    # What takes the rest has no name.
    return frozenset() if match is None or match.url_name is None else _methods_of(match.func)


def _methods_of(view: Callable[..., Any]) -> frozenset[str]:
    """The document itself is no operation of it."""
    return frozenset(each.method for each in getattr(view, "operations", ())) or frozenset(("GET",))


def _takes(methods: frozenset[str], method: str) -> bool:
    return ("GET" if method == "HEAD" else method) in methods


def _is_below_prefix(segments: Sequence[str]) -> bool:
    return bool(segments) and f"/{segments[0]}" in _PREFIXES


def _segments(path: str) -> list[str]:
    """As it was meant: without empty ones, and as if `.` and `..` led somewhere."""
    segments: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del segments[-1:]
        elif part not in ("", "."):
            segments.append(part)
    return segments


def _joined(segments: Any) -> str:
    return "/" + "/".join(segments)


@cache
def _routes() -> tuple[_Route, ...]:
    named = _named(get_resolver().url_patterns, "")
    return tuple(route for route in named if _is_below_prefix(route.parts))


def _named(patterns: Sequence[URLPattern | URLResolver], before: str) -> Iterator[_Route]:
    for each in patterns:
        if not isinstance(each.pattern, RoutePattern):
            continue
        route = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from _named(each.url_patterns, route)
        elif each.name:
            yield _Route(tuple(_segments(route)), _methods_of(each.callback))
