"""When every action runs, given what each costs: before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xform.sharding.pipeline._order import Order, run
from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._ticks import lengths, ticks
from xform.sharding.pipeline._times import UNIT, Times
from xform.sharding.pipeline._verify import verify


@dataclass(frozen=True)
class Bar:
    """An action as it runs.

    Attributes:
      rank: where.
      start, end: when.
      action: what.
    """

    rank: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Who works when. It prints as text, shows itself in notebooks, and draws itself (`plot`).

    Attributes:
      schedule: the schedule.
      bars: its actions in time, rank by rank.
      lockstep: whether ranks advance in ticks, as one program does, or each on its own.
      end: when the last is done, messages counted.
      starts: of ticks, where there are any.
    """

    schedule: Schedule
    bars: tuple[Bar, ...]
    lockstep: bool
    end: float
    starts: tuple[float, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it works."""
        busy = [0.0] * self.schedule.ranks
        for bar in self.bars:
            busy[bar.rank] += bar.end - bar.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        return 1.0 - sum(self.busy) / (self.end * self.schedule.ranks) if self.end else 0.0

    def text(self, *, colour: bool = False) -> str:
        """The chart in characters; with the colours of a terminal if asked for."""
        from xform.sharding.pipeline._picture import as_text

        return as_text(self, colour=colour)

    def __str__(self):
        return self.text()

    def _repr_html_(self) -> str:
        from xform.sharding.pipeline._picture import as_html

        return as_html(self)

    def plot(self, ax=None):
        """Draws the chart by matplotlib, on `ax` or on new axes, and returns the axes."""
        from xform.sharding.pipeline._picture import plot

        return plot(self, ax)


def simulate(schedule: Schedule, times: Times = UNIT, *, lockstep: bool = False) -> Timeline:
    """Returns who works when.

    Args:
      schedule: the schedule; it is verified first, so that this comes to an end.
      times: what each action takes, given or measured.
      lockstep: whether ranks advance together in ticks that last as long as their slowest rank
        (`one_program`), or each on its own (`per_stage`). A tick ends with its messages.

    Raises:
      ScheduleError: the schedule can't run.
      ValueError: `times` has not one entry for each stage.

    >>> from xform.sharding.pipeline import one_f_one_b, zb_h1
    >>> simulate(one_f_one_b(4, 8)).bubble == 9 / (9 + 24)
    True
    >>> simulate(zb_h1(4, 8)).end
    27.0
    """
    verify(schedule)
    times.check(schedule.stages)
    schedule = schedule.without_messages()
    return (_lockstep if lockstep else _asynchronous)(schedule, times)


def _asynchronous(schedule: Schedule, times: Times) -> Timeline:
    order = Order(schedule)
    ends: dict[Action, tuple[float, int]] = {}
    clocks = [0.0] * schedule.ranks
    bars: list[list[Bar]] = [[] for _ in range(schedule.ranks)]
    for rank, _, cell in run(schedule, order):
        outside = [ends[need] for a in cell for need in order.needs(a) if need not in cell]
        start = max([clocks[rank], *(end + times.send * (at != rank) for end, at in outside)])
        _place(bars[rank], rank, start, cell, times)
        clocks[rank] = bars[rank][-1].end
        ends.update(dict.fromkeys(cell, (clocks[rank], rank)))
    every = tuple(bar for row in bars for bar in row)
    return Timeline(schedule, every, False, max(clocks))


def _lockstep(schedule: Schedule, times: Times) -> Timeline:
    bars: list[list[Bar]] = [[] for _ in range(schedule.ranks)]
    times = replace(times, overlap=1.0)  # what shares a tick does not share its time
    now, starts, filled = 0.0, [], ticks(schedule, times)
    for tick, length in zip(filled, lengths(filled, times), strict=True):
        starts.append(now)
        for rank, cell in enumerate(tick):
            _place(bars[rank], rank, now, cell, times)
        now += length
    every = tuple(bar for row in bars for bar in row)
    return Timeline(schedule, every, True, now, tuple(starts))


def _place(bars: list[Bar], rank: int, start: float, cell: Sequence[Action], times: Times) -> None:
    """Adds the bars of a cell, one after the other."""
    share = times.of_cell(cell) / (sum(map(times.of, cell)) or 1.0)
    for action in cell:
        end = start + times.of(action) * share
        bars.append(Bar(rank, start, end, action))
        start = end
