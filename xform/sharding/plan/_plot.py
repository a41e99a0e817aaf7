"""The picture of plans. matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xform._show import axes
from xform.sharding.pipeline._times import Real

if TYPE_CHECKING:
    from xform.sharding.plan._plan import Plan

_COLOURS = {
    "compute": "#2d6a8e",
    "communication": "#c8553d",
    "bubble": "#dddad2",
    "overhead": "#8a8a8a",
}


def bars(plans: Sequence[Plan], ax: Any = None) -> Any:
    """Draws a bar for each plan: seconds of a step, by what they go to, with MFU and memory."""
    ax = axes(ax, 9, 1.2 + 0.45 * len(plans))
    for kind, colour in _COLOURS.items():
        values = [plan.step.parts[kind] for plan in plans]
        starts = [_before(plan, kind) for plan in plans]
        ax.barh(range(len(plans)), values, left=starts, color=colour, label=kind)
    for i, plan in enumerate(plans):
        text = f" {plan.mfu:.0%} MFU, {plan.memory.total / 2**30:.0f} GiB"
        ax.annotate(text, (plan.seconds, i), va="center", size=8)
    ax.set_yticks(range(len(plans)), [str(plan.layout) for plan in plans], size=7)
    ax.set(xlabel="seconds of a step", xlim=(0, 1.25 * max(p.seconds for p in plans)))
    ax.invert_yaxis()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    return ax


def _before(plan: Plan, kind: str) -> Real:
    parts = plan.step.parts
    return sum(parts[name] for name in list(parts)[: list(parts).index(kind)])
