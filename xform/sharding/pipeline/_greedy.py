"""Schedules from a rule, by list scheduling: a new schedule is a line that says what is urgent."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._times import UNIT, Real, Times


def greedy(
    priority: Callable[[Action], Any],
    rank_of: Sequence[int],
    microbatches: int,
    *,
    split: bool = False,
    times: Times = UNIT,
    limit: int | Sequence[int] | None = None,
    name: str = "",
) -> Schedule:
    """Returns the schedule that a rule makes: whoever is free runs its most urgent ready action.

    It never waits while something is ready, which is fast and not always the fastest.

    Args:
      priority: of an action, anything that sorts; the smallest runs first, and of equals the one
        of the earliest microbatch.
      rank_of: the rank of each stage: `range(4)`, or `[0, 1, 1, 0]` for a V of two ranks.
      microbatches: how many there are.
      split: whether backward passes are made in two parts, I and W.
      times: what each action takes, by which is told what is free and ready when.
      limit: how many microbatches, counted per chunk, a rank may have begun and not ended; one
        number, or one for each rank. With several chunks a rank must have room for all of them.
      name: what pictures call the schedule.

    Raises:
      ValueError: an argument is out of range, or the limit leaves nothing that could run.

    >>> backward_first = lambda action: action.kind == "F"
    >>> print(greedy(backward_first, range(2), 3, limit=[2, 1]))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """
    limits = _check(list(rank_of), microbatches, times, limit)
    floor = _Floor(list(rank_of), limits, times, split)
    for m in range(microbatches):
        floor.happens(0.0, rank_of[0], Action("F", 0, m))
    while floor.events:
        now = floor.arrive()
        for rank in range(len(limits)):
            may = floor.may_run(rank)
            if may:
                urgent = lambda a: (priority(a), a.microbatch, a.kind, a.stage)
                floor.run(min(may, key=urgent), rank, now)
    if any(floor.ready):
        stuck = "; ".join(
            f"rank {rank} may hold {limits[rank]} and has `{min(row)}` to begin"
            for rank, row in enumerate(floor.ready)
            if row
        )
        raise ValueError(f"`limit` leaves nothing that could run: {stuck}. Raise it.")
    return Schedule(floor.rows, name)


def in_turn(schedule: Schedule, *, split: bool) -> Schedule:
    """The same stages on the same ranks, and all of a kind before the next: F, then B or I, W."""
    rule = lambda action: "FBIW".index(action.kind)
    return greedy(rule, schedule.rank_of, schedule.microbatches, split=split)


class _Floor:
    """What is free and what is ready, as time goes on.

    Attributes:
      rows: for each rank what it has run.
      ready: for each rank what it could run.
      events: when an action becomes ready on its rank, or (None) the rank free; a heap.
    """

    def __init__(self, rank_of: list[int], limits: Sequence[Real], times: Times, split: bool):
        self.rank_of, self.limits, self.times, self.split = rank_of, limits, times, split
        self.rows: list[list[Action]] = [[] for _ in limits]
        self.ready: list[list[Action]] = [[] for _ in limits]
        self.events: list[tuple[float, int, int, Action | None]] = []
        self._begun, self._free, self._count = [0] * len(limits), [True] * len(limits), 0

    def happens(self, time: float, rank: int, action: Action | None) -> None:
        """Notes an event; those of one time arrive in the order in which they were noted."""
        heapq.heappush(self.events, (time, self._count, rank, action))
        self._count += 1

    def arrive(self) -> float:
        """Takes in all events of the next time that has some, and returns it."""
        now = self.events[0][0]
        while self.events and self.events[0][0] == now:
            _, _, rank, action = heapq.heappop(self.events)
            if action is None:
                self._free[rank] = True
            else:
                self.ready[rank].append(action)
        return now

    def may_run(self, rank: int) -> list[Action]:
        """What a rank could begin now."""
        if not self._free[rank]:
            return []
        full = self._begun[rank] >= self.limits[rank]
        return [action for action in self.ready[rank] if not (full and action.kind == "F")]

    def run(self, action: Action, rank: int, now: float) -> None:
        """Begins an action."""
        self.ready[rank].remove(action)
        self.rows[rank].append(action)
        self._begun[rank] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        self._free[rank], end = False, now + self.times.of(action)
        self.happens(end, rank, None)
        for after in _unlocks(action, len(self.rank_of), self.split):
            target = self.rank_of[after.stage]
            self.happens(end + self.times.send * (target != rank), target, after)


def _unlocks(action: Action, stages: int, split: bool) -> Iterator[Action]:
    """What becomes ready as an action ends: each waits for one, but the pass through a stage."""
    kind, stage, m = action.kind, action.stage, action.microbatch
    backward = "I" if split else "B"
    if kind == "F":
        last = stage == stages - 1
        yield Action(backward, stage, m) if last else Action("F", stage + 1, m)
    elif kind != "W":
        if split:
            yield Action("W", stage, m)
        if stage > 0:
            yield Action(backward, stage - 1, m)


def _check(
    rank_of: Sequence[int], microbatches: int, times: Times, limit: int | Sequence[int] | None
) -> Sequence[Real]:
    """The limit of each rank, if the arguments make sense."""
    ranks = max(rank_of, default=-1) + 1
    if not ranks or {*rank_of} != {*range(ranks)}:
        raise ValueError(
            f"`rank_of={list(rank_of)}`: name a rank for each stage, and leave out no rank."
        )
    if microbatches < 1:
        raise ValueError(f"`greedy` needs at least one microbatch; found {microbatches}.")
    times.check(len(rank_of))
    limits = [*limit] if isinstance(limit, Sequence) else [limit or math.inf] * ranks
    if len(limits) != ranks or min(limits) < 1 or limit == 0:
        raise ValueError(
            f"`limit={limit}`: one number of at least 1, or one for each of {ranks} ranks."
        )
    return limits
