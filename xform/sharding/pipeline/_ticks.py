"""A schedule in lockstep: which tick runs which cell.

One program for all ranks advances in ticks. A tick has three slots, a forward pass, a backward
pass and a weight gradient, and each rank fills those that its row says next, in this order; then
all send at once. What another rank made arrives with the next tick; what the same rank made can
be used in a later slot of the same one.

A tick lasts as long as its slowest rank. Where every rank runs a forward and a backward pass in
each tick, filling all slots is right; where its neighbours hold a rank back, as in 1F1B, it makes
ticks long that others idle through, and one action a tick is better. The shorter one is taken.
"""

from __future__ import annotations

from xform.sharding.pipeline._order import Order
from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._times import UNIT, Times

# The slots that each kind fills, where the backward pass is made in one, and where in two parts.
_WHOLE = {"F": (0,), "B": (1,)}
_PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}

type Tick = tuple[tuple[Action, ...], ...]


def is_split(schedule: Schedule) -> bool:
    """Whether some backward pass is made in two parts."""
    return any(action.kind == "I" for _, _, action in schedule.actions())


def ticks(schedule: Schedule, times: Times = UNIT, *, split: bool | None = None) -> list[Tick]:
    """Returns, for each tick, the actions of each rank; the schedule must be legal.

    Args:
      schedule: the schedule.
      times: what actions take, by which the shorter way to fill ticks is found.
      split: whether a B takes the slots of I and of W; where None, if the schedule has an I.

    >>> from xform.sharding.pipeline import one_f_one_b
    >>> for tick in ticks(one_f_one_b(2, 2)):
    ...     print([" ".join(map(str, actions)) for actions in tick])
    ['0F0', '']
    ['0F1', '1F0 1B0']
    ['0B0', '1F1 1B1']
    ['0B1', '']
    """
    schedule = schedule.without_messages()
    slots = _PARTS if (is_split(schedule) if split is None else split) else _WHOLE
    return min(
        (_fill(schedule, slots, most) for most in (3, 1)), key=lambda t: sum(lengths(t, times))
    )


def lengths(filled: list[Tick], times: Times) -> list[float]:
    """How long each tick lasts: as long as its slowest rank."""
    return [max(sum(map(times.of, cell), 0.0) for cell in tick) + times.send for tick in filled]


def _fill(schedule: Schedule, slots: dict[str, tuple[int, ...]], most: int) -> list[Tick]:
    """The ticks, with at most so many actions of a rank in each."""
    order = Order(schedule)
    rows = [[action for cell in row for action in cell] for row in schedule.rows]
    done: dict[Action, tuple[int, int]] = {}  # the tick and the rank
    next_action = [0] * schedule.ranks
    out: list[Tick] = []
    while any(n < len(row) for n, row in zip(next_action, rows, strict=True)):
        tick, taken = len(out), []
        for rank, row in enumerate(rows):
            actions, slot = [], -1
            while next_action[rank] < len(row) and len(actions) < most:
                action = row[next_action[rank]]
                arrived = all(
                    need in done and (done[need][0] < tick or done[need][1] == rank)
                    for need in order.needs(action)
                )
                if slots[action.kind][0] <= slot or not arrived:
                    break
                slot = slots[action.kind][-1]
                done[action] = (tick, rank)
                actions.append(action)
                next_action[rank] += 1
            taken.append(tuple(actions))
        if not any(taken):
            raise AssertionError("a schedule that was not verified")
        out.append(tuple(taken))
    return out
