"""Pictures of a report. matplotlib is loaded when one is drawn."""

from typing import Any

from xform._explain._measure import CLASSES

_COLOURS = dict(zip(CLASSES, ("tab:blue", "tab:orange", "tab:red"), strict=True))


def _axes(ax: Any, width: float | int, height: float | int) -> Any:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, which no window manager keeps alive.
    return Figure(figsize=(width, height), layout="constrained").subplots()


def timeline(report: Any, ax: Any = None) -> Any:
    """Draws a measured run: a row for each device."""
    if report.run is None:
        raise ValueError("the report has no run: call `explain(f)` on arrays, without a target")
    events = [event for event in report.run.events if event.kind in CLASSES]
    devices = sorted({event.device for event in events}, key=lambda d: (len(d), d))
    ax = _axes(ax, 9, 1.2 + 0.35 * len(devices))
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
    ax.legend(loc="lower right", ncols=3)
    return ax
