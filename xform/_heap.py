"""How much a heap takes for buffers whose lives are known: XLA's best fit, which leaves gaps.

The largest come first, of equal ones those that live longest, each in the smallest gap that is free
while it lives; or else those that live longest come first. The smaller of the two heaps is taken.
A life is as long as the number of other buffers that begin or end meanwhile, so that of a chain of
arrays of one size the ends may come before the middle, which then needs a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# What is smaller than this part of all fits into some gap.
_SMALL = 2**-10


class Life(NamedTuple):
    """One buffer, from the first to the last node that needs it, and which write over it."""

    bytes: int
    start: int
    end: int
    written: tuple[int, ...] = ()


def heap_size(lives: Sequence[Life], least: int) -> int:
    """Returns the bytes of the heap; `least` is the most that lives at once."""
    counted = _by_events(sorted(lives, key=lambda life: life.start))
    large = [life for life in counted if life.bytes > _SMALL * least]
    if not large:
        return least
    sizes, starts, ends = (
        np.array(column) for column in zip(*(life[:3] for life in large), strict=True)
    )
    lengths = ends - starts
    best = 0
    for order in (np.lexsort((-lengths, -sizes)), np.lexsort((-sizes, -lengths))):
        found = _best_fit(sizes[order], starts[order], ends[order])
        best = min(best or found, found)
        if best <= least:
            return least
    return best


def _by_events(lives: Sequence[Life]) -> list[Life]:
    """The same, with events in place of nodes, whose results begin before their operands end."""
    events: list[tuple[int, int, int]] = []
    for k, life in enumerate(lives):
        events += [(at, 0, k) for at in (life.start, *life.written)]
        events += [(at, 1, k) for at in (*life.written, life.end)]
    found = [Life(life.bytes, len(events), 0) for life in lives]
    for tick, (_, _, k) in enumerate(sorted(events)):
        found[k] = Life(found[k].bytes, min(tick, found[k].start), tick)
    return found


def _best_fit(sizes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    """The size of the heap where each buffer is put, in turn, into the smallest gap."""
    offsets = np.zeros_like(sizes)
    for i, size in enumerate(sizes):
        beside = np.flatnonzero((starts[:i] < ends[i]) & (ends[:i] > starts[i]))
        offsets[i] = _gap(offsets[beside], sizes[beside], int(size))
    return int(np.max(offsets + sizes, initial=0))


def _gap(offsets: np.ndarray, sizes: np.ndarray, size: int) -> int:
    """Where the smallest gap between others begins that has room; behind all if there is none."""
    order = np.argsort(offsets)
    begin = offsets[order]
    free = np.concatenate(([0], np.maximum.accumulate(begin + sizes[order])))
    room = begin - free[:-1]
    fits = np.flatnonzero(room >= size)
    return int(free[fits[np.argmin(room[fits])]] if len(fits) else free[-1])
