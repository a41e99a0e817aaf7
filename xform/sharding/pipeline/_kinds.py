"""The passes of stages that are not all alike, behind one set of types.

Stages of one function are one kind. What a kind keeps, and what crosses in it from I to W, is put
into slots that all kinds share: as many of each type as the kind with most of it has. So a buffer
holds any stage's values, and a stage of fewer layers leaves some of its slots empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import varying_axes
from xform.sharding.pipeline._split import Split


class Kinds:
    """Passes by stage, a number that may be traced. Values between them are lists of leaves.

    Attributes:
      each: the passes of each kind.
      split: whether backward passes are made in parts.
      early, late, cross: the types of what waits for I alone; for B or W; and from I to W.
    """

    def __init__(self, each: Sequence[Split], of_stage: Sequence[int], *, split: bool):
        self.each, self._of_stage, self.split = tuple(each), tuple(of_stage), split
        flags = [passes.late if split else [True] * len(passes.keeps) for passes in each]
        self._late = flags
        self.early, self._early_at = _share([_where(p.keeps, f, False) for p, f in self._pairs()])
        self.late, self._late_at = _share([_where(p.keeps, f, True) for p, f in self._pairs()])
        crossing = [[c.type for c in p.crossing] if split else [] for p in each]
        self.cross, self._cross_at = _share(crossing)

    def _pairs(self):
        return zip(self.each, self._late, strict=True)

    def forward(self, stage, weights, x, given) -> tuple[list, list, list]:
        """Pass F: what the stage gives, and what it keeps, early and late."""

        def run(kind: int, weights, x, given):
            y, keep = self.each[kind].forward(weights, x, given)
            early, late = (_where(keep, self._late[kind], flag) for flag in (False, True))
            early = _put(early, self._early_at[kind], self.early)
            return jax.tree.leaves(y), early, _put(late, self._late_at[kind], self.late)

        return self._by_kind(run, stage, weights, x, given)

    def backward(
        self, stage, weights, kept, g, given, sums, add: Callable
    ) -> tuple[list, list, Any]:
        """Pass B or I: the gradient of the input, what crosses to W, and sums with what is new."""

        def run(kind: int, weights, kept, g, given, sums):
            passes, keep = self.each[kind], self._kept(kind, *kept)
            if self.split:
                dx, crossing, d = passes.input_gradient(weights, keep, g, given)
            else:
                (dx, d), crossing = passes.backward(weights, keep, g, given), []
            crossing = _put(crossing, self._cross_at[kind], self.cross)
            return jax.tree.leaves(dx), crossing, add(sums, d)

        return self._by_kind(run, stage, weights, kept, g, given, sums)

    def weight_gradient(self, stage, weights, late, crossing, given, sums, add: Callable) -> Any:
        """Pass W: sums with what is new."""

        def run(kind: int, weights, late, crossing, given, sums):
            late = [late[i] for i in self._late_at[kind]]
            crossing = [crossing[i] for i in self._cross_at[kind]]
            return add(sums, self.each[kind].weight_gradient(weights, late, crossing, given))

        return self._by_kind(run, stage, weights, late, crossing, given, sums)

    def _kept(self, kind: int, early: Sequence, late: Sequence) -> list:
        """What a kind keeps, in its own order."""
        these = iter([late[i] for i in self._late_at[kind]])
        those = iter([early[i] for i in self._early_at[kind]])
        return [next(these if is_late else those) for is_late in self._late[kind]]

    def _by_kind(self, run: Callable, stage, *operands):
        if len(self.each) == 1:
            return run(0, *operands)
        kind = lax.dynamic_index_in_dim(jnp.array(self._of_stage), stage, keepdims=False)
        branches = [lambda *args, kind=kind: run(kind, *args) for kind in range(len(self.each))]
        return lax.switch(kind, branches, *operands)


def _where(values: Sequence, flags: Sequence[bool], wanted: bool) -> list:
    return [v for v, flag in zip(values, flags, strict=True) if flag == wanted]


def _share(types: Sequence[Sequence]) -> tuple[list, list[list[int]]]:
    """Slots for lists of types, and which slot each has."""
    key = lambda t: (t.shape, str(t.dtype), varying_axes(t))
    slots: list[Any] = []
    places: dict[Any, list[int]] = {}
    found = []
    for of_kind in types:
        used: Counter = Counter()
        at = []
        for t in of_kind:
            mine = places.setdefault(key(t), [])
            if used[key(t)] == len(mine):
                mine.append(len(slots))
                slots.append(t)
            at.append(mine[used[key(t)]])
            used[key(t)] += 1
        found.append(at)
    return slots, found


def _put(values: Sequence, at: Sequence[int], slots: Sequence) -> list:
    """The values in their slots, zeros in the others."""
    out: list[Any] = [None] * len(slots)
    for i, value in zip(at, values, strict=True):
        out[i] = value
    return [_zeros(t) if v is None else v for v, t in zip(out, slots, strict=True)]


def _zeros(t):
    zeros = jnp.zeros(t.shape, t.dtype)
    axes = tuple(sorted(varying_axes(t)))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
