"""What all reports share: lines as their reader knows them, tables as text and HTML, axes.

In a notebook a cell is compiled from a file that nobody ever sees; IPython knows its number.
"""

import html
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


def _shell() -> Any:
    """The IPython that runs this process; None outside of it, and where it was never loaded."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get else None


def named(file: str) -> str:
    """Returns a file of source code by the name that its reader knows: of a cell, `"In[3]"`.

    >>> named("model.py")
    'model.py'
    """
    name_of = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    cell = name_of(file) if name_of else None
    return cell[1] if cell else file


def short(line: str) -> str:
    """Returns a line with its file relative to the working directory, or its last two parts.

    >>> short("/home/ada/model/layers.py:7 (attend)")
    'model/layers.py:7 (attend)'
    """
    file, colon, rest = line.partition(":")
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    elif len(path.parts) > 2:
        path = Path(*path.parts[-2:])
    return f"{path}{colon}{rest}"


class Table(NamedTuple):
    """A title, the names of the columns, and rows of text; the last column is words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_text(table: Table, *, margin: str = "  ") -> str:
    """Returns a table as text, numbers to the right; without a title, none.

    >>> print(as_text(Table("Sizes", ["bytes", "what"], [["12", "x"], ["4000", "y"]])))
    Sizes
      bytes  what
         12  x
       4000  y
    """
    rows: Iterable[Sequence[str]] = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: "  ".join(
        text.rjust(width) for text, width in zip(row[:-1], widths, strict=False)
    )
    lines = [f"{margin}{pad(row)}  {row[-1]}" for row in rows]
    return "\n".join([table.title, *lines] if table.title else lines)


def as_html(table: Table) -> str:
    """Returns a table as HTML.

    >>> print(as_html(Table("", ["what"], [["x < y"]])).partition("<tr><td")[2])
     style="text-align:left;padding:2px 8px;white-space:nowrap">x &lt; y</td></tr></table>
    """
    sides = ["right"] * (len(table.head) - 1) + ["left"]

    def row(tag: str, texts: Sequence[str]) -> str:
        style = lambda side: f"text-align:{side};padding:2px 8px;white-space:nowrap"
        cells = (
            f'<{tag} style="{style(side)}">{html.escape(text)}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    title = f"<b>{html.escape(table.title)}</b>" if table.title else ""
    rows = [row("th", table.head), *(row("td", texts) for texts in table.rows)]
    return f"{title}<table>{''.join(rows)}</table>"


def page(title: str, tables: Iterable[Table], notes: Iterable[str]) -> str:
    """Returns a title, tables and single facts as HTML."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    facts = f"<ul>{items}</ul>" if items else ""
    return f"<h4>{html.escape(title)}</h4>{''.join(map(as_html, tables))}{facts}"


def axes(ax: Any, width: float | int, height: float | int) -> Any:
    """Returns axes to draw on: those given, or those of a new figure, which a notebook shows.

    Elsewhere it is a figure of its own, which no window manager keeps alive.
    """
    if ax is not None:
        return ax
    if _shell() is not None:
        import matplotlib.pyplot as plt

        return plt.subplots(figsize=(width, height), layout="constrained")[1]
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


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
