"""Reports as rows of cells, and those as XLSX (as CSV: tenants/csv_text.py). Every amount is an integer, exact."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Final

import xlsxwriter

from inference.models import LatencyMetric
from inference.reports import SHARES, Dimension, Line, Report
from tenants.csv_text import Cell

_EXACT: Final = 2**53
"""Spreadsheets reckon in doubles: beyond this an integer is kept as text."""


def columns(report: Report) -> list[str]:
    names = ["start"]
    for dimension in report.group_by:
        named = dimension in (Dimension.PROJECT, Dimension.KEY)
        names += [f"{dimension}_id", f"{dimension}_name"] if named else [str(dimension)]
    names += ["requests", "input_tokens", "cached_input_tokens", "output_tokens"]
    names += ["cost_microusd", "adjustment_microusd", "total_microusd"]
    return names + [f"{metric}_p{share * 100:.0f}_ms" for metric in LatencyMetric for share in SHARES]


def cells(line: Line, report: Report, names: dict[str, str]) -> list[Cell]:
    """One row of `columns`; `names` are those of keys and projects by public id."""
    row: list[Cell] = [line.starts.isoformat()]
    for dimension in report.group_by:
        value = line.groups[dimension]
        row.append(value)
        if dimension in (Dimension.PROJECT, Dimension.KEY):
            row.append(names.get(value, ""))
    row += [line.requests, line.prompt_tokens, line.cached_tokens, line.completion_tokens]
    row += [line.cost_microusd, line.adjustment_microusd, line.total_microusd]
    for metric in LatencyMetric:
        row += [None if value is None else round(value, 1) for value in line.latency_ms[metric]]
    return row


def as_xlsx(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> bytes:
    """One sheet; rows go to a temporary file as they come, so that memory holds one of them."""
    file = io.BytesIO()
    # Every cell is written by its type, never guessed from its text: a formula stays a text.
    with xlsxwriter.Workbook(file, {"constant_memory": True, "strings_to_formulas": False}) as book:
        sheet = book.add_worksheet("Usage")
        sheet.freeze_panes(1, 0)
        sheet.set_column(0, len(header) - 1, 18)
        bold = book.add_format({"bold": True})
        for column, name in enumerate(header):
            sheet.write_string(0, column, name, bold)
        for number, row in enumerate(rows, start=1):
            for column, cell in enumerate(row):
                if cell is None or cell == "":
                    continue
                if isinstance(cell, str) or not -_EXACT <= cell <= _EXACT:
                    sheet.write_string(number, column, str(cell))
                else:
                    sheet.write_number(number, column, cell)
    return file.getvalue()
