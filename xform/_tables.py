"""Reports as tables of text and of HTML, with numbers to three digits."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    """A title, the names of the columns, and rows of text; the last column is words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_text(table: Table) -> str:
    """The table in columns; of the last, words begin at the left."""
    rows: Iterable[Sequence[str]] = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: "  ".join(
        text.rjust(width) for text, width in zip(row[:-1], widths, strict=False)
    )
    lines = [f"  {pad(row)}  {row[-1]}" for row in rows]
    return "\n".join([table.title, *lines])


def as_html(table: Table) -> str:
    """The table for a notebook."""
    cell = lambda tag, text: f'<{tag} style="text-align:right">{html.escape(text)}</{tag}>'
    row = lambda tag, texts: f"<tr>{''.join(cell(tag, text) for text in texts)}</tr>"
    body = "".join(row("td", texts) for texts in table.rows)
    return f"<b>{html.escape(table.title)}</b><table>{row('th', table.head)}{body}</table>"


def short(line: str) -> str:
    """A line's file relative to the working directory, or its last two parts."""
    file, colon, rest = line.partition(":")
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    elif len(path.parts) > 2:
        path = Path(*path.parts[-2:])
    return f"{path}{colon}{rest}"


def si(value: float | int) -> str:
    """A number to three digits with its prefix: `1.5 M`, `20 µ`."""
    if not value:
        return "0 "
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}"
    for scale, prefix in ((1e-3, "m"), (1e-6, "µ"), (0, "n")):
        if abs(value) >= scale:
            return f"{value / (scale or 1e-9):.3g} {prefix}"
    return str(value)
