"""Proof that a schedule is right and can't hang, or the cells that make it wrong.

A schedule is legal if every stage does each microbatch's work exactly once, nothing runs before
what it needs, and no ranks wait for one another in a circle. Then any executor that runs each
rank's cells in order, and sends results as soon as they are made, comes to an end: of the cells
that are left, the one that is first in a topological order can always run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xform.sharding.pipeline._order import Order, run
from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._times import Real

_SHOWN = 10


@dataclass(frozen=True)
class Problem:
    """What is wrong with one cell.

    Attributes:
      rank, step: where the cell is; the step is None for an action that is not there.
      action: which action of it.
      why: what is wrong, and what would be right.
    """

    rank: int | None
    step: int | None
    action: Action
    why: str

    def __str__(self):
        where = "no rank" if self.rank is None else f"rank {self.rank}"
        step = "" if self.step is None else f", step {self.step}"
        return f"{where}{step}: `{self.action}` {self.why}"


class ScheduleError(ValueError):
    """A schedule that must not run.

    Attributes:
      problems: every cell that is wrong, as far as they can be told apart.
    """

    def __init__(self, schedule: Schedule, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        more = len(self.problems) - _SHOWN
        super().__init__(
            f"the schedule {f'`{schedule.name}` ' if schedule.name else ''}can't run:\n  "
            + "\n  ".join(map(str, self.problems[:_SHOWN]))
            + (f"\n  and {more} more" if more > 0 else "")
        )


@dataclass(frozen=True)
class Held:
    """What a stage keeps of one microbatch between its passes, in bytes or any unit.

    Attributes:
      whole: from F until its B, or its W.
      until_input: from F until its B, or its I only.
      between: from its I until its W.
    """

    whole: Real = 1
    until_input: Real = 0
    between: Real = 0


_COUNT = Held()


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that can run.

    Attributes:
      schedule: the schedule.
      in_flight: for each rank, how many microbatches, counted per chunk, it holds at most: begun
        by F, not ended by B or W.
      peak: for each rank, the most that it holds, in the unit of `Held`.
      messages: how many results travel between ranks.
    """

    schedule: Schedule
    in_flight: tuple[int, ...]
    peak: tuple[float, ...]
    messages: int

    def __str__(self):
        name = self.schedule.name or "schedule"
        rows = (
            f"  rank {rank}: {count} in flight, holds {peak:g}"
            for rank, (count, peak) in enumerate(zip(self.in_flight, self.peak, strict=True))
        )
        return f"{name}: legal, {self.messages} messages\n" + "\n".join(rows)


def verify(
    schedule: Schedule,
    *,
    held: Held | Sequence[Held] = _COUNT,
    limit: Real | Sequence[Real] | None = None,
) -> Proof:
    """Returns the proof that a schedule is legal, with what it holds; else raises.

    Args:
      schedule: the schedule.
      held: what a stage keeps per microbatch; one for all stages, or one for each.
      limit: the most that a rank may hold, in the same unit; one for all ranks, or one for each.

    Raises:
      ScheduleError: a stage on two ranks; an action that is missing, done twice, or both whole
        and in parts; one before what it needs; a message that is not sent, not received, or
        received in another order than sent; ranks that wait for one another; a rank that holds
        more than it may. It lists rank, step and action of each.

    >>> from xform.sharding.pipeline import gpipe
    >>> print(verify(gpipe(2, 4)))
    GPipe: legal, 8 messages
      rank 0: 4 in flight, holds 4
      rank 1: 4 in flight, holds 4
    >>> verify(Schedule([["F0", "B0"], ["B0", "F0"]]))
    Traceback (most recent call last):
    ...
    xform.sharding.pipeline._verify.ScheduleError: the schedule can't run:
      rank 1, step 0: `1B0` needs `1F0`, which comes after it, at step 1
    """
    if problems := [*_once(schedule)]:
        raise ScheduleError(schedule, problems)
    order = Order(schedule)
    for check in (_messages, _before, _circle):
        if problems := [*check(schedule, order)]:
            raise ScheduleError(schedule, problems)
    in_flight, _ = _peaks(schedule, _per(_COUNT, schedule.stages, "held"))
    peak, over = _peaks(schedule, _per(held, schedule.stages, "held"), limit)
    if over:
        raise ScheduleError(schedule, over)
    moves = sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False))
    return Proof(
        schedule, tuple(map(int, in_flight)), tuple(peak), 2 * moves * schedule.microbatches
    )


def _once(schedule: Schedule) -> Iterator[Problem]:
    """Each action exactly once, and on the rank that owns its stage."""
    if not schedule.microbatches:
        yield Problem(None, None, Action("F", 0, 0), "is missing: the schedule has no action")
        return
    where = defaultdict(list)
    for rank, step, action in schedule.actions():
        where[action].append((rank, step))
    strangers = _strangers(schedule, where)
    for action, places in where.items():
        owner = schedule.rank_of[action.stage]
        first = places[0]
        for rank, step in places:
            if action in strangers:
                yield Problem(rank, step, action, strangers[action])
            elif rank != owner:
                why = f"is on another rank than the rest of stage {action.stage}, rank {owner}"
                yield Problem(rank, step, action, why)
            elif (rank, step) != first:
                why = f"is done twice: it is on rank {first[0]}, step {first[1]}, already"
                yield Problem(rank, step, action, why)
    # Beside a slip in a number, what has nothing but slips is not asked to be complete.
    known = [action for action in where if action not in strangers]
    stages = {a.stage for a in known} if strangers else range(schedule.stages)
    microbatches = {a.microbatch for a in known} if strangers else range(schedule.microbatches)
    for stage in sorted(stages):
        for m in sorted(microbatches):
            yield from _whole_or_parts(schedule, where, stage, m)


def _strangers(schedule: Schedule, where: dict) -> dict[Action, str]:
    """Actions of a stage or microbatch that has hardly any other: a slip in a number."""
    compute = [action for action in where if len(action.kind) == 1]
    by_stage = Counter(action.stage for action in compute)
    by_microbatch = Counter(action.microbatch for action in compute)
    stages, microbatches = _few(by_stage), _few(by_microbatch)
    out = {}
    for action in compute:
        if action.stage in stages:
            out[action] = f"is of a stage, {action.stage}, that does hardly anything else"
        elif action.microbatch in microbatches:
            out[action] = f"is of a microbatch, {action.microbatch}, that has hardly any other"
    return out


def _few(counts: Counter[int]) -> set[int]:
    """Numbers with hardly any action: a quarter of the most, or half, beyond a gap."""
    most, gap = (
        max(counts.values(), default=0),
        next(n for n in range(len(counts) + 1) if n not in counts),
    )
    return {k for k, n in counts.items() if (2 if k > gap else 4) * n <= most}


def _whole_or_parts(schedule: Schedule, where: dict, stage: int, m: int) -> Iterator[Problem]:
    """F, and either B or both I and W."""
    owner = schedule.rank_of[stage] if schedule.rank_of[stage] >= 0 else None
    has = {kind: Action(kind, stage, m) for kind in "FBIW" if Action(kind, stage, m) in where}
    missing = lambda kind, why: Problem(owner, None, Action(kind, stage, m), f"is missing{why}")
    if "F" not in has:
        there = ", ".join(f"`{other}`" for other in has.values())
        yield missing("F", f", and {there} there" if there else "")
    if "B" in has:
        for kind in {"I", "W"} & has.keys():
            rank, step = where[has[kind]][0]
            yield Problem(rank, step, has[kind], f"and `{has['B']}`: B is I and W in one")
    elif not {"I", "W"} & has.keys():
        yield missing("B", ", or the two parts of it, I and W")
    else:
        for kind, other in (("I", "W"), ("W", "I")):
            if kind not in has:
                yield missing(kind, f", to go with `{has[other]}`")


def _messages(schedule: Schedule, order: Order) -> Iterator[Problem]:
    """Where messages are spelled out: each result sent once, received once, in the same order."""
    if not order.spelled_out:
        return
    at = {action: (rank, step) for rank, step, action in schedule.actions()}
    rank_of, last = order.rank_of, schedule.stages - 1
    hops = [(s, s + 1, "F") for s in range(last)] + [(s + 1, s, "B") for s in range(last)]
    hops = [hop for hop in hops if rank_of[hop[0]] != rank_of[hop[1]]]
    wanted = {
        Action(f"{way}_{kind}", stage, m)
        for source, target, kind in hops
        for way, stage in (("SEND", source), ("RECV", target))
        for m in range(schedule.microbatches)
    }
    for action in sorted(wanted - at.keys()):
        yield Problem(rank_of[action.stage], None, action, "is missing: spell all messages or none")
    for action in (a for a in at if len(a.kind) > 1 and a not in wanted):
        yield Problem(*at[action], action, "is no message between two ranks")
    channels = defaultdict(list)
    for action in sorted(wanted & at.keys(), key=at.__getitem__):
        if action.kind.startswith("SEND"):
            step = 1 if action.kind == "SEND_F" else -1
            got = Action(
                action.kind.replace("SEND", "RECV"), action.stage + step, action.microbatch
            )
            if got in at:
                channels[rank_of[action.stage], rank_of[got.stage]].append(got)
    for (source, target), sent in channels.items():
        for i, got in enumerate(sorted(sent, key=at.__getitem__)):
            if got != sent[i]:
                why = f"is received where rank {source} sends what `{sent[i]}` receives"
                yield Problem(target, at[got][1], got, why)
                break


def _before(schedule: Schedule, order: Order) -> Iterator[Problem]:
    """On one rank, nothing before what it needs."""
    at = {action: (rank, step) for rank, step, action in schedule.actions()}
    cells = {(rank, step): schedule.rows[rank][step] for rank, step, _ in schedule.actions()}
    for action, (rank, step) in at.items():
        for need in order.needs(action):
            where = at.get(need)
            if where is None or where[0] != rank:
                continue
            cell = cells[rank, step]
            if where[1] > step or (where[1] == step and cell.index(need) > cell.index(action)):
                why = f"needs `{need}`, which comes after it, at step {where[1]}"
                yield Problem(rank, step, action, why)


def _circle(schedule: Schedule, order: Order) -> Iterator[Problem]:
    """No ranks that wait for one another: runs the table, and looks at where it gets stuck."""
    done: set[Action] = set()
    next_step = [0] * schedule.ranks
    for rank, step, cell in run(schedule, order):
        done.update(cell)
        next_step[rank] = step + 1
    stuck = [rank for rank, row in enumerate(schedule.rows) if next_step[rank] < len(row)]
    if not stuck:
        return
    at = {action: rank for rank, _, action in schedule.actions()}
    waits = {}  # for each stuck rank, what it is about to run and what for
    for rank in stuck:
        cell = schedule.rows[rank][next_step[rank]]
        pairs = ((a, need) for a in cell for need in order.needs(a))
        waits[rank] = next((a, n) for a, n in pairs if n not in done and n not in cell)
    told = set()
    for rank in stuck:
        path = []
        while rank not in path and rank not in told:
            path.append(rank)
            rank = at[waits[rank][1]]
        told.update(path)
        for member in path[path.index(rank) :] if rank in path else ():
            action, need = waits[member]
            why = f"waits for `{need}` of rank {at[need]}, and so in a circle"
            yield Problem(member, next_step[member], action, why)


def _peaks(
    schedule: Schedule, held: Sequence[Held], limit: Real | Sequence[Real] | None = None
) -> tuple[list[float], list[Problem]]:
    """The most that each rank holds, and the first cell of each that holds more than it may."""
    limits = [None] * schedule.ranks if limit is None else _per(limit, schedule.ranks, "limit")
    peaks, over = [0.0] * schedule.ranks, []
    now = [0.0] * schedule.ranks
    split = {(a.stage, a.microbatch) for _, _, a in schedule.actions() if a.kind == "I"}
    for rank, step, action in schedule.actions():
        keeps = held[action.stage]
        whole = (action.stage, action.microbatch) not in split
        match action.kind:
            case "F":
                now[rank] += keeps.whole + keeps.until_input
            case "I":
                now[rank] += keeps.between
        if now[rank] > peaks[rank]:
            most = limits[rank]
            if most is not None and now[rank] > most >= peaks[rank]:
                why = f"makes the rank hold {now[rank]:g}, and it may hold {most:g}"
                over.append(Problem(rank, step, action, why))
            peaks[rank] = now[rank]
        match action.kind:
            case "B" if whole:
                now[rank] -= keeps.whole + keeps.until_input
            case "I":
                now[rank] -= keeps.until_input
            case "W":
                now[rank] -= keeps.whole + keeps.between
    return peaks, over


def _per[T](value: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """One value for each, from one for all."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(f"`{name}` has {len(values)} entries, and there are {count}.")
    return values
