"""Names that people give: what can be stored, and shown on one line."""

from __future__ import annotations

from typing import Final
from unicodedata import bidirectional, category

from django.core.exceptions import ValidationError

_CONTROLS: Final = frozenset(("Cc", "Zl", "Zp"))
_TURNS: Final = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
"""What turns the direction of the text behind it (UAX 9): a name, and its neighbours, would be shown as others."""


def clean_name(name: str, *, field: str = "name") -> str:
    """Without blanks around it. Raises ValidationError for control characters (no column takes a NUL), ends of lines
    and what turns the direction of text."""
    name = name.strip()
    if bad := next((one for one in name if category(one) in _CONTROLS or bidirectional(one) in _TURNS), None):
        raise ValidationError(
            {field: f"It holds a character that can't be shown (U+{ord(bad):04X}): leave that out."}
        )
    return name
