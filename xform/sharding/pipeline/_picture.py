"""The chart of a schedule: a line for each rank, a bar for each action."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from xform._show import axes

if TYPE_CHECKING:
    from xform.sharding.pipeline._simulate import Bar, Timeline

# Columns of a printed chart, beyond which bars lose their labels.
_WIDTH = 220
_COLOURS = {"F": "#2d6a8e", "B": "#3f9b5b", "I": "#5fb98a", "W": "#f2a65a"}
_ANSI = {"F": "48;5;25;97", "B": "48;5;28;97", "I": "48;5;72;30", "W": "48;5;215;30"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_WAITS = "#f2f2ef"


def as_text(timeline: Timeline, *, colour: bool = False) -> str:
    """The chart in characters: `F3` begins where its bar does; with chunks, `F3'` is the second."""
    bars = [bar for bar in timeline.bars if bar.end > bar.start]
    labels = [_label(timeline, bar) for bar in bars]
    longest = max(map(len, labels), default=1) + 1
    shortest = min((bar.end - bar.start for bar in bars), default=1.0)
    fits = [n for n in range(longest, 0, -1) if timeline.end * n / shortest <= _WIDTH]
    scale = fits[0] / shortest if fits else _WIDTH / (timeline.end or 1.0)
    columns = round(timeline.end * scale)
    lines = [["·"] * columns for _ in range(timeline.schedule.ranks)]
    for bar, label in zip(bars, labels, strict=True):
        start, end = round(bar.start * scale), round(bar.end * scale)
        if start == end:
            continue
        text = label if len(label) <= end - start else bar.action.kind
        cells = [*text.ljust(end - start, " " if colour else "─")]
        if colour:
            cells[0] = f"\x1b[{_ANSI[bar.action.kind]}m{cells[0]}"
            cells[-1] += "\x1b[0m"
        elif len(text) < len(cells):
            cells[-1] = " "
        lines[bar.rank][start:end] = cells
    digits = len(str(timeline.schedule.ranks - 1))
    rows = [f"rank {rank:>{digits}} {''.join(line).rstrip()}" for rank, line in enumerate(lines)]
    return "\n".join([*rows, summary(timeline)])


def summary(timeline: Timeline) -> str:
    """The numbers below the chart."""
    kind = f"lockstep, {len(timeline.starts)} ticks" if timeline.lockstep else "asynchronous"
    name = timeline.schedule.name or "schedule"
    return f"{name}, {kind}: {timeline.end:g} in all, {timeline.bubble:.1%} bubble"


def as_html(timeline: Timeline) -> str:
    """The chart for a notebook or a page."""
    ranks, end = timeline.schedule.ranks, timeline.end or 1.0
    width, height = 960, 24
    scale = width / end
    shapes = [
        f'<rect x="0" y="{rank * height + 1}" width="{width}" height="{height - 2}" '
        f'fill="{_WAITS}"/>'
        for rank in range(ranks)
    ]
    for bar in timeline.bars:
        x, w = bar.start * scale, (bar.end - bar.start) * scale
        y, label = bar.rank * height + 1, _label(timeline, bar)
        tip = f"{bar.action} on rank {bar.rank}: {bar.start:g} to {bar.end:g}"
        shapes.append(
            f'<g><title>{html.escape(tip)}</title><rect x="{x:.2f}" y="{y}" width="{w:.2f}" '
            f'height="{height - 2}" fill="{_COLOURS[bar.action.kind]}" '
            f'opacity="{_opacity(timeline, bar)}" stroke="white" stroke-width="0.5"/>'
        )
        if w > 7 * len(label):
            shapes.append(
                f'<text x="{x + w / 2:.2f}" y="{y + 15}" fill="white" font-size="11" '
                f'text-anchor="middle">{html.escape(label)}</text>'
            )
        shapes.append("</g>")
    shapes += [
        f'<line x1="{s * scale:.2f}" x2="{s * scale:.2f}" y1="0" y2="{ranks * height}" '
        'stroke="#888" stroke-width="0.4"/>'
        for s in timeline.starts
    ]
    key = "".join(
        f'<span style="background:{_COLOURS[kind]};padding:0 .6em"></span>'
        f'<span style="margin:0 1em 0 .3em">{_NAMES[kind]}</span>'
        for kind in _kinds(timeline)
    )
    return (
        '<figure style="margin:0;font:13px sans-serif">'
        f"<figcaption><b>{html.escape(summary(timeline))}</b></figcaption>"
        f'<svg viewBox="0 0 {width} {ranks * height}" width="{width}" role="img">'
        f"{''.join(shapes)}</svg><div>{key}</div></figure>"
    )


def plot(timeline: Timeline, ax=None):
    """The chart by matplotlib."""
    width = min(20.0, max(6.0, len(timeline.bars) / timeline.schedule.ranks * 0.35))
    ax = axes(ax, width, 0.4 * timeline.schedule.ranks + 1.4)
    seen = set()
    for bar in timeline.bars:
        kind, length = bar.action.kind, bar.end - bar.start
        ax.barh(
            bar.rank, length, left=bar.start, height=0.9, color=_COLOURS[kind],
            alpha=_opacity(timeline, bar), edgecolor="white", linewidth=0.5,
            label=None if kind in seen else _NAMES[kind],
        )  # fmt: skip
        seen.add(kind)
        if length >= timeline.end / 60:
            middle = bar.start + length / 2
            text = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
            ax.text(middle, bar.rank, _label(timeline, bar), **text)
    for start in timeline.starts:
        ax.axvline(start, color="#888", linewidth=0.4)
    ax.set_yticks(
        range(timeline.schedule.ranks), [f"rank {r}" for r in range(timeline.schedule.ranks)]
    )
    ax.set_xlim(0, timeline.end)
    ax.invert_yaxis()
    ax.set_xlabel("time (in the unit of the costs)", fontsize=8)
    ax.set_title(summary(timeline), fontsize=9)
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return ax


def _kinds(timeline: Timeline) -> list[str]:
    found = {bar.action.kind for bar in timeline.bars}
    return [kind for kind in _COLOURS if kind in found]


def _chunk(timeline: Timeline, bar: Bar) -> int:
    return timeline.schedule.stages_of[bar.rank].index(bar.action.stage)


def _label(timeline: Timeline, bar: Bar) -> str:
    return f"{bar.action.kind}{bar.action.microbatch}" + "'" * _chunk(timeline, bar)


def _opacity(timeline: Timeline, bar: Bar) -> float:
    """Later chunks are paler."""
    chunks = len(timeline.schedule.stages_of[bar.rank])
    return round(1.0 - 0.5 * _chunk(timeline, bar) / chunks, 2)
