"""The four ways in which OpenAI's API takes plain prompts and texts."""

from __future__ import annotations

from typing import TypeAlias, cast

from inference.errors import InvalidRequest
from inference.schemas.sampling import TokenId
from tenants.counting import counted

Prompts: TypeAlias = str | list[str | TokenId | list[TokenId]]


def prompts_of(given: Prompts, *, param: str, at_most: int) -> list[str | list[int]]:
    """One entry per prompt, in order: text, or token ids. Raises InvalidRequest."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], given)]  # there may be many
    if kinds not in ({str}, {list}):
        raise InvalidRequest(
            f"'{param}' must be a string, a list of strings, a list of token ids, or a list of such lists.",
            param=param,
        )
    prompts = [entry for entry in given if not isinstance(entry, int)]
    if len(prompts) > at_most:
        raise InvalidRequest(
            f"'{param}' takes at most {counted(at_most, 'entry', 'entries')} at once, not {len(prompts)}.",
            param=param,
        )
    return prompts
