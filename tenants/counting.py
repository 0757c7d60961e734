"""Numbers with their nouns, for people to read."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 token`, `2 tokens`; `1 entry`, `2 entries`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
