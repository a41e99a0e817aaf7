"""A schedule as numbers: what one program reads to know what to do in each tick.

The table is an array `[ticks, ranks, columns]`. Beside what runs, it says where everything lies:
each rank has ring buffers for what arrives, for what a stage keeps until its backward pass, and for
what its input gradient leaves to its weight gradient. Slots are given out here, ahead of time, each
to the next that needs one once its last reader is done; so buffers are as long as the most that
wait at once, whatever the number of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._ticks import is_split, ticks
from xform.sharding.pipeline._times import UNIT, Times
from xform.sharding.pipeline._verify import verify

# What a rank does in a tick: in the slots F, I (or B) and W; and where arrivals of it go. Ups come
# from the rank before, downs from the one after, and "here" from another chunk of the same rank.
COLUMNS = (
    "f", "f_first", "f_last", "f_stage", "f_chunk", "f_batch", "f_x", "f_g", "f_early", "f_late",
    "i", "i_first", "i_last", "i_stage", "i_chunk", "i_batch", "i_g", "i_early", "i_late",
    "i_cross",
    "w", "w_stage", "w_chunk", "w_batch", "w_late", "w_cross",
    "x_up", "x_up_to", "x_here", "x_here_to", "x_down", "x_down_to",
    "g_up", "g_up_to", "g_here", "g_here_to", "g_down", "g_down_to",
)  # fmt: skip
_WAYS = {1: "up", 0: "here", -1: "down"}
# When, within a tick: its three slots, and the arrival of what is sent at its end.
_F, _I, _W, _ARRIVE, _PHASES = range(5)


@dataclass(frozen=True)
class Room:
    """How long the buffers of one program are: what a table needs, or what a program is given.

    Attributes:
      ticks: rows of the table.
      x: activations that wait for their F, on one rank.
      g: cotangents that wait for their B or I, and outputs of the last stage for theirs.
      early: microbatches whose values wait for I alone.
      late: those whose values wait for B or W.
      cross: those between I and W; 0 where no backward pass is made in parts.
    """

    ticks: int
    x: int
    g: int
    early: int
    late: int
    cross: int

    def __or__(self, other: Room) -> Room:
        """Room for both."""
        return Room(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule as numbers.

    Attributes:
      schedule: the schedule.
      numbers: int32 `[ticks, ranks, columns]`, with the columns of `COLUMNS`.
      room: what it needs.
      x_ways, g_ways: which ways activations and cotangents travel: of "up", "here", "down".
    """

    schedule: Schedule
    numbers: np.ndarray
    room: Room
    x_ways: tuple[str, ...]
    g_ways: tuple[str, ...]

    def alone(self, slot: str, stage: int) -> np.ndarray:
        """A tick `[1, ranks, columns]` of one action of a stage, and nothing beside it."""
        rank = self.schedule.rank_of[stage]
        chunk = self.schedule.stages_of[rank].index(stage)
        busy = self.numbers[:, rank, COLUMNS.index(slot)] > 0
        mine = busy & (self.numbers[:, rank, COLUMNS.index(f"{slot}_chunk")] == chunk)
        own = [i for i, name in enumerate(COLUMNS) if name.split("_")[0] == slot]
        out = np.zeros_like(self.numbers[:1])
        out[0, rank, own] = self.numbers[np.flatnonzero(mine)[-1], rank, own]
        return out

    def padded(self, count: int) -> np.ndarray:
        """The numbers with idle ticks at the end, `count` in all."""
        return np.pad(self.numbers, ((0, count - len(self.numbers)), (0, 0), (0, 0)))


@lru_cache(maxsize=256)
def table(schedule: Schedule, times: Times = UNIT, *, split: bool | None = None) -> Table:
    """Returns the table of a schedule, which is verified first.

    Args:
      schedule: the schedule.
      times: what actions take, by which ticks are filled.
      split: whether every backward pass is run in two parts, a B as I and W in one tick; where
        None, if some are.

    Raises:
      ScheduleError: the schedule can't run.
      ValueError: ranks own different numbers of stages, or a stage's successor is neither on its
        rank nor on one beside it (the last and the first are beside each other).

    >>> from xform.sharding.pipeline import one_f_one_b
    >>> table(one_f_one_b(2, 4)).numbers.shape[:2]  # ticks, ranks
    (7, 2)
    """
    verify(schedule)
    schedule = schedule.without_messages()
    x_ways = _ways(schedule)
    split = is_split(schedule) if split is None else split
    filled = ticks(schedule, times, split=split)
    when = {action: t * _PHASES for t, tick in enumerate(filled) for row in tick for action in row}
    lives = _lives(schedule, when, split)
    slots, counts = {}, {}
    for buffer, of_buffer in lives.items():
        slots[buffer], counts[buffer] = _give_out(of_buffer, schedule)
    numbers = np.zeros((len(filled), schedule.ranks, len(COLUMNS)), np.int32)
    for t, tick in enumerate(filled):
        for rank, actions in enumerate(tick):
            for action in actions:
                _write(numbers, t, rank, action, schedule, slots, split)
    room = Room(len(filled), *(counts[name] for name in ("x", "g", "early", "late", "cross")))
    turned = {"up": "down", "here": "here", "down": "up"}
    return Table(schedule, numbers, room, x_ways, tuple(turned[way] for way in x_ways))


def fits(room: Room, need: Room) -> list[str]:
    """What of a program's room is too small for a table."""
    pairs = ((f.name, getattr(room, f.name), getattr(need, f.name)) for f in fields(Room))
    return [f"{name}: {has}, and {wants} are needed" for name, has, wants in pairs if has < wants]


def _ways(schedule: Schedule) -> tuple[str, ...]:
    """Which ways activations travel."""
    owned = [len(stages) for stages in schedule.stages_of]
    if len({*owned}) > 1:
        raise ValueError(
            f"`one_program` needs as many stages on every rank, and the ranks own {owned}."
        )
    ways = {}
    for stage in range(schedule.stages - 1):
        way = _way(schedule, stage)
        if way is None:
            here, there = schedule.rank_of[stage : stage + 2]
            raise ValueError(
                f"`one_program` sends to the next rank or the one before, and stage {stage} is on "
                f"rank {here}, stage {stage + 1} on {there}."
            )
        ways[way] = None
    return tuple(way for way in _WAYS.values() if way in ways)


def _way(schedule: Schedule, stage: int) -> str | None:
    """The way from a stage to the next one."""
    ranks = schedule.ranks
    hop = (schedule.rank_of[stage + 1] - schedule.rank_of[stage]) % ranks
    return {-1 % ranks: "down", 1 % ranks: "up", 0: "here"}.get(hop)  # of two ranks, up


type _Lives = dict[tuple[int, int], tuple[int, int]]


def _lives(schedule: Schedule, when: dict[Action, int], split: bool) -> dict[str, _Lives]:
    """When slots are written and last read: by buffer, and by stage and microbatch."""
    lives: dict[str, _Lives] = {name: {} for name in ("x", "g", "early", "late", "cross")}
    last = schedule.stages - 1
    backward = {(a.stage, a.microbatch): a for a in when if a.kind in "BI"}
    for (stage, m), action in backward.items():
        at = stage, m
        forward, back = when[Action("F", stage, m)], when[action]
        if stage > 0:
            lives["x"][at] = when[Action("F", stage - 1, m)] + _ARRIVE, forward + _F
        made = forward + _F if stage == last else when[backward[stage + 1, m]] + _ARRIVE
        lives["g"][at] = made, back + _I
        end = when[Action("W", stage, m)] if action.kind == "I" else back
        lives["late"][at] = forward + _F, end + (_W if split else _I)
        if split:
            lives["early"][at] = forward + _F, back + _I
            lives["cross"][at] = back + _I, end + _W
    return lives


def _give_out(lives: _Lives, schedule: Schedule) -> tuple[dict[tuple[int, int], int], int]:
    """A slot for each life, so that no two of a rank share one at a time; and how many it takes."""
    until: list[list[int]] = [[] for _ in range(schedule.ranks)]
    slots = {}
    for at, (start, end) in sorted(lives.items(), key=lambda item: item[1]):
        busy = until[schedule.rank_of[at[0]]]
        slot = next((k for k, free_after in enumerate(busy) if free_after < start), len(busy))
        busy[slot : slot + 1] = [end]
        slots[at] = slot
    return slots, max(map(len, until))


def _write(
    numbers: np.ndarray, t: int, rank: int, action: Action, schedule: Schedule,
    slots: dict, split: bool,
) -> None:  # fmt: skip
    """Writes what an action reads and leaves, on its rank and on the one that it sends to."""
    kind, stage, m = action.kind, action.stage, action.microbatch
    at, last = (stage, m), schedule.stages - 1
    chunk = schedule.stages_of[rank].index(stage)

    def put(rank: int, **values: int) -> None:
        for name, value in values.items():
            numbers[t, rank, COLUMNS.index(name)] = value

    def arrive(what: str, way: str | None, target: int) -> None:
        to = schedule.rank_of[target]
        put(to, **{f"{what}_{way}": 1, f"{what}_{way}_to": slots[what][target, m]})

    place = {"stage": stage, "chunk": chunk, "batch": m, "late": slots["late"][at], "": 1}
    ends = {"first": int(stage == 0), "last": int(stage == last)}
    early = {"early": slots["early"].get(at, 0)}
    cross = {"cross": slots["cross"].get(at, 0)}
    if kind == "F":
        _put_all(
            put, rank, "f", place, ends, early, {"x": slots["x"].get(at, 0), "g": slots["g"][at]}
        )
        if stage < last:
            arrive("x", _way(schedule, stage), stage + 1)
    if kind in "BI":
        _put_all(put, rank, "i", place, ends, early, cross, {"g": slots["g"][at]})
        if stage > 0:
            turned = {"up": "down", "here": "here", "down": "up"}
            arrive("g", turned[_way(schedule, stage - 1) or ""], stage - 1)
    if kind == "W" or (kind == "B" and split):
        _put_all(put, rank, "w", place, cross)


def _put_all(put, rank: int, slot: str, *groups: dict[str, int]) -> None:
    for group in groups:
        put(rank, **{f"{slot}_{name}" if name else slot: value for name, value in group.items()})
