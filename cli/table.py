"""Rows in columns as wide as their content: ids are there to be copied, so nothing is cut to the terminal's width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def print_rows(console: Console, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints headers and rows as plain text."""
    text = [tuple(headers), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(headers))]
    for number, row in enumerate(text):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        style = "bold" if number == 0 else None
        console.print(line, style=style, markup=False, soft_wrap=True, overflow="ignore", crop=False)
