"""Pictures of a report. matplotlib is loaded when one is drawn."""

from typing import Any

from xform._explain._measure import CLASSES
from xform._show import axes

_COLOURS = dict(zip(CLASSES, ("tab:blue", "tab:orange", "tab:red"), strict=True))


def timeline(report: Any, ax: Any = None) -> Any:
    """Draws a measured run: a row for each device."""
    if report.run is None:
        raise ValueError("the report has no run: call `explain(f)` on arrays, without a target")
    events = [event for event in report.run.events if event.kind in CLASSES]
    devices = sorted({event.device for event in events}, key=lambda d: (len(d), d))
    ax = axes(ax, 9, 1.2 + 0.35 * len(devices))
    for kind in CLASSES:
        for row, device in enumerate(devices):
            bars = [
                (event.start / 1e3, (event.end - event.start) / 1e3)
                for event in events
                if event.device == device and event.kind == kind
            ]
            ax.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[kind])
        ax.plot([], [], color=_COLOURS[kind], linewidth=6, label=kind)
    ax.set(xlim=(0, report.run.wall / 1e3), xlabel="time (µs)", ylabel="device")
    ax.set_yticks(range(len(devices)), [name.removeprefix("/device:") for name in devices])
    ax.invert_yaxis()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    return ax


def roofline(report: Any, ax: Any = None) -> Any:
    """Draws each line under what the device can do: operations a byte, operations a second.

    A line stands where it was measured; without a run, at the least time that its kernels take.
    """
    lines = [x for x in report.lines if x.work.total and x.read + x.written]
    ax = axes(ax, 7, 5)
    devices = report.program.module.partitions
    points = []
    for x in lines:
        seconds = x.seconds / devices if x.seconds is not None else x.least
        if seconds:
            points.append((x.work.total / (x.read + x.written), x.work.total / seconds, x))
    ax.scatter([p[0] for p in points], [p[1] for p in points], color="tab:blue", zorder=3)
    for intensity, rate, x in sorted(points, key=lambda p: -p[2].work.total)[:8]:
        ax.annotate(
            _place(x.line), (intensity, rate), xytext=(4, 4), textcoords="offset points", size=8
        )
    if report.device and points:
        _roof(ax, report.device, [p[0] for p in points])
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    return ax


def _roof(ax: Any, device: Any, intensities: list[float]) -> None:
    """Draws the limit of memory, and that of each kind of product."""
    low, high = min(intensities) / 4, 4 * max(intensities)
    for peak in sorted(set(device.peak.values())):
        kinds = [kind for kind, value in device.peak.items() if value == peak]
        ridge = peak / device.bandwidth
        xs = sorted({low, min(max(ridge, low), high), high})
        ax.plot(xs, [min(peak, device.bandwidth * x) for x in xs], color="0.6", linewidth=1)
        label = ", ".join(kinds[:2]) + (", …" if len(kinds) > 2 else "")
        ax.annotate(
            label, (high, min(peak, device.bandwidth * high)), ha="right", va="bottom", size=7
        )


def _place(line: str) -> str:
    """`file:line`, without folder and function."""
    return line.rpartition("/")[2].partition(" ")[0]
