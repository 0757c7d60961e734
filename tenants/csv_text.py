"""Rows as CSV: the one place that writes it. Text can't become a formula in a spreadsheet that opens the file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Final

Cell = str | int | float | Decimal | None

_MARK: Final = b"\xef\xbb\xbf"
"""By which spreadsheets know UTF-8."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets that open a CSV take for a formula's begin (OWASP, "CSV Injection"), the wide forms too."""
_PART: Final = 500


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> bytes:
    """RFC 4180 in UTF-8."""
    return b"".join(csv_parts(header, rows))


def csv_parts(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[bytes]:
    """The same, some hundred rows at a time."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    yield _MARK
    for number, row in enumerate(rows, start=1):
        writer.writerow([_defused(cell) for cell in row])
        if number % _PART == 0:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()


def _defused(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
