"""The schedules of the field, for any number of ranks and microbatches.

Sources: GPipe (arXiv 1811.06965); 1F1B (PipeDream, arXiv 1806.03377) and its interleaved form
(Megatron-LM, arXiv 2104.04473); ZB-H1 (arXiv 2401.10241) and ZB-V (arXiv 2405.15362) of the
zero-bubble papers; DualPipe-V (DeepSeek-V3, arXiv 2412.19437, and the cut-in-half form of it).
They are written from the phases that these describe. Where one is defined only for enough
microbatches, or for a multiple of the ranks, it is built for the next number that is, and what is
too much is left out: actions depend only on those of their own microbatch, so that no order can
break. `greedy` makes such tables from a rule instead.

Bubbles below are idle time per rank, with F, I, W for the time of each, R ranks and B = I + W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from xform.sharding.pipeline._schedule import Action, Cell, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes: every activation is held at once.

    Bubble: (R - 1)(F + B).

    >>> print(gpipe(2, 2))
    F0 F1 B0 B1
    F0 F1 B0 B1
    """
    _check("gpipe", ranks, microbatches)
    each = range(microbatches)
    row = lambda rank: [Action(kind, rank, m) for kind in "FB" for m in each]
    return Schedule([row(rank) for rank in range(ranks)], "GPipe")


def one_f_one_b(ranks: int, microbatches: int, *, ahead: int = 1) -> Schedule:
    """1F1B: rank r runs `ahead * (R - r - 1)` forward passes ahead, and holds one more than that.

    Bubble: (R - 1)(F + B), as GPipe. In lockstep a tick holds one forward and one backward pass
    only where `ahead` is 2; so it takes that, and its memory, to reach this bubble there.

    >>> print(one_f_one_b(2, 3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """
    _check("one_f_one_b", ranks, microbatches, ahead=ahead)

    def row(rank: int) -> list[Action]:
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        backwards = [Action("B", rank, m) for m in range(microbatches)]
        return _alternate(forwards, backwards, ahead * (ranks - rank - 1))

    name = "1F1B" if ahead == 1 else f"1F1B, {ahead} ahead"
    return Schedule([row(rank) for rank in range(ranks)], name)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r owns the stages r, r + R, …, and works on R microbatches at a time.

    Bubble, where R divides the microbatches: (R - 1)(F + B) for the F and B of one chunk.

    >>> print(interleaved(2, 2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    _check("interleaved", ranks, microbatches, chunks=chunks)
    built = -(-microbatches // ranks) * ranks

    def row(rank: int) -> list[Action]:
        steps = [
            (chunk, m)
            for group in range(0, built, ranks)
            for chunk in range(chunks)
            for m in range(group, group + ranks)
        ]
        forwards = [Action("F", chunk * ranks + rank, m) for chunk, m in steps]
        backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in steps]
        ahead = (2 if chunks > 1 else 1) * (ranks - rank - 1) + (chunks - 1) * ranks
        return _alternate(forwards, backwards, ahead)

    rows = [_only(((action,) for action in row(rank)), microbatches) for rank in range(ranks)]
    return Schedule(rows, f"interleaved 1F1B, {chunks} chunks")


def zb_h1(ranks: int, microbatches: int, *, ahead: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients wait, those of rank r for r microbatches.

    Every rank holds at most R microbatches, which is what 1F1B holds on its first rank.
    Bubble: (R - 1)(F + I - W), where enough microbatches follow one another. With `ahead=2` it is
    ZB-H2: 2R - 1 microbatches held, and a bubble of 0 where F = I = W, save that the first ranks
    begin and end earlier.

    >>> print(zb_h1(2, 3))
    F0 F1 I0 W0 F2 I1 W1 I2 W2
    F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    _check("zb_h1", ranks, microbatches, ahead=ahead)

    def row(rank: int) -> list[Action]:
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        inputs = [Action("I", rank, m) for m in range(microbatches)]
        out, late = [], ahead * rank
        for action in _alternate(forwards, inputs, ahead * (ranks - rank - 1)):
            out.append(action)
            if action.kind == "I" and action.microbatch >= late:
                out.append(Action("W", rank, action.microbatch - late))
        left = range(max(0, microbatches - late), microbatches)
        return out + [Action("W", rank, m) for m in left]

    return Schedule([row(rank) for rank in range(ranks)], f"ZB-H{ahead}")


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank in the shape of a V, so that the first rank also has the loss.

    Rank r owns the stages r and 2R - 1 - r. Bubble: none, where F = I = W and there are 2R
    microbatches or more, for the memory of 1F1B.

    >>> print(zb_v(1, 2))
    0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    _check("zb_v", ranks, microbatches)
    built = max(microbatches, 2 * ranks - 1)

    def row(rank: int) -> list[Cell]:
        row = _Row(rank, 2 * ranks - 1 - rank)
        row.add("F0", times=2 * (ranks - rank) - 1)
        row.add("F1", "F0", times=rank)
        row.add("F1", "I1", "W1", times=ranks - rank)
        while row.done["F1"] < built:
            row.add("F0", times=row.done["F0"] < built)
            row.add("I0", "W0", "F1", "I1", "W1")
        row.add("I0", "I1", times=rank)
        row.add("I0", "W0", times=ranks - rank)
        for weights in ("W1", "W0"):
            row.add(weights, times=built - row.done[weights])
        return row.cells

    return Schedule([_only(row(rank), microbatches) for rank in range(ranks)], "ZB-V")


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe-V: a V as in ZB-V, where forward and backward passes of two microbatches pair up.

    A pair is one cell, for an executor that hides the messages of one in the work of the other.

    >>> print(dualpipe_v(1, 2))
    0F0 1F0 0F1 1B0 1F1+0B0 1B1 0I1 0W1
    """
    _check("dualpipe_v", ranks, microbatches)
    built = max(microbatches, 2 * ranks)

    def row(rank: int) -> list[Cell]:
        row, after = _Row(rank, 2 * ranks - 1 - rank), ranks - rank - 1
        row.add("F0", times=2 * after)
        row.add("F0", "F1", times=rank + 1)
        row.add("I1", "W1", "F1", times=after)
        if after:
            row.add("F0+B1", "F1+B0", times=built - 2 * ranks + rank + 1)
        else:  # the last rank has just made what its first backward pass needs
            row.add("F0", "B1", "F1+B0")
            row.add("F0+B1", "F1+B0", times=built - ranks - 1)
        row.add("B1", "F1+B0", times=after)
        # The last R input gradients run ahead of their weight gradients.
        ends = ["B1", "B0"] * (rank + 1)
        whole = rank + 1
        row.add(*ends[:whole], *(end.replace("B", "I") for end in ends[whole:]))
        waiting = [f"W{end[1]}" for end in ends[whole:]] + ["W0"] * after
        for weights in waiting[:after]:
            row.add(weights, "I0")
        row.add(*waiting[after:])
        return row.cells

    return Schedule([_only(row(rank), microbatches) for rank in range(ranks)], "DualPipe-V")


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
"""Functions that make schedules, by the names that the command line knows."""


def build(name: str, ranks: int, microbatches: int, **options) -> Schedule:
    """Returns a schedule by its name: one of `BUILDERS`, which says the options too.

    >>> print(build("1f1b", 1, 2))
    F0 B0 F1 B1
    """
    if name not in BUILDERS:
        raise ValueError(f"no schedule is called `{name}`: choose one of {', '.join(BUILDERS)}.")
    return BUILDERS[name](ranks, microbatches, **options)


class _Row:
    """Writes the cells of a rank that owns two stages: `F0` is the next F of its first one."""

    def __init__(self, *stages: int):
        self.stages = stages
        self.cells: list[Cell] = []
        self.done: Counter[str] = Counter()

    def add(self, *cells: str, times: int = 1) -> None:
        for _ in range(times):
            self.cells += [tuple(map(self._next, cell.split("+"))) for cell in cells]

    def _next(self, name: str) -> Action:
        kind, chunk = name
        counted = ("I", "W") if kind == "B" else (kind,)
        action = Action(kind, self.stages[int(chunk)], self.done[counted[0] + chunk])
        self.done.update(counter + chunk for counter in counted)
        return action


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """So many forward passes ahead, then one of each in turn, then the backward passes left."""
    ahead = min(ahead, len(forwards))
    out = forwards[:ahead]
    for i, backward in enumerate(backwards):
        out += [*forwards[ahead + i : ahead + i + 1], backward]
    return out


def _only(row: Iterable[Cell], microbatches: int) -> list[Cell]:
    """The row without what belongs to later microbatches."""
    return [tuple(a for a in cell if a.microbatch < microbatches) for cell in row]


def _check(name: str, ranks: int, microbatches: int, **more: int) -> None:
    given = {"ranks": ranks, "microbatches": microbatches, **more}
    if wrong := [f"{key}={value}" for key, value in given.items() if value < 1]:
        raise ValueError(f"`{name}` needs numbers of at least 1; found {', '.join(wrong)}.")
