"""What actions take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xform.sharding.pipeline._schedule import Action

type Real = int | float


@dataclass(frozen=True)
class Times:
    """What an action takes, in any unit of time.

    Attributes:
      F, I, W: a forward pass, an input gradient, a weight gradient; one number for all stages, or
        one for each.
      B: a whole backward pass; I + W where None.
      send: a message between two ranks.
      overlap: what actions that run together in one cell take, as a share of their sum.
    """

    F: Real | Sequence[Real] = 1.0
    B: Real | Sequence[Real] | None = None
    I: Real | Sequence[Real] = 1.0  # noqa: E741
    W: Real | Sequence[Real] = 1.0
    send: Real = 0.0
    overlap: Real = 1.0

    def __post_init__(self):
        for name in ("F", "B", "I", "W"):
            value = getattr(self, name)
            if isinstance(value, Iterable):
                object.__setattr__(self, name, tuple(map(float, value)))

    def of(self, action: Action) -> float:
        """The time of an action.

        >>> Times(F=[1, 2]).of(Action("F", 1, 0)), Times().of(Action("B", 1, 0))
        (2.0, 2.0)
        """
        at = lambda value: float(value[action.stage] if isinstance(value, Sequence) else value)
        if action.kind == "B" and self.B is None:
            return at(self.I) + at(self.W)
        return at(getattr(self, action.kind))

    def of_cell(self, cell: Sequence[Action]) -> float:
        """The time of actions that run together."""
        return sum(map(self.of, cell)) * (self.overlap if len(cell) > 1 else 1.0)

    def check(self, stages: int) -> None:
        """Raises unless there is a time, not below zero, for every stage."""
        for name in ("F", "B", "I", "W", "send", "overlap"):
            value = getattr(self, name)
            values = [*value] if isinstance(value, Sequence) else [0.0 if value is None else value]
            if isinstance(value, Sequence) and len(values) != stages:
                raise ValueError(
                    f"`Times({name}=…)` has {len(values)} entries, and the schedule has {stages} "
                    "stages: give one number for all of them, or one for each."
                )
            if not all(v >= 0 for v in values):
                raise ValueError(f"`Times({name}={value})`: a time is a number, 0 or more.")


UNIT = Times()
