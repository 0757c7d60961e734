"""Names that people give: what can be stored, and shown on one line."""

from __future__ import annotations

from unicodedata import category

from django.core.exceptions import ValidationError


def clean_name(name: str, *, field: str = "name") -> str:
    """Without blanks around it. Raises ValidationError for control characters (no column takes a NUL)."""
    name = name.strip()
    if any(category(character) == "Cc" for character in name):
        raise ValidationError({field: "It holds a control character."})
    return name
