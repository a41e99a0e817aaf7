"""`stages`: cuts a model into stages of a pipeline, at marks or where it is balanced.

A loss is traced to a jaxpr, and its equations are put in a row. What depends on the batch alone, or
on parameters alone, is no work to be divided: each stage makes what it needs of it. What depends on
both is a *unit*; of a scan over layers, each layer is one. A cut between two units sends what is
made before it and read after it. Where to cut is found exactly, by dynamic programming:

    best(s, k) = min over j < k of max(best(s - 1, j), cost(j, k) + link · bytes(k))

the least that the slowest of s stages can take, if they end before unit k; and then, of all cuts
that reach it, those that send the fewest bytes.

Stages need not be alike, and an executor wants arrays of one shape on every rank. So parameters go
into *slots*: arrays with a leading dim for the stages, as many of each shape as the stage with most
of them uses, with zeros where it uses less. A parameter that several stages use is in a slot of
each; `join` adds up its gradients. What travels goes into slots as well, and so does the loss.

Not done: a scan whose results other than its carry are read, or that scans over anything but
parameters or the batch, is not cut inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import varying_axes
from xform._stages._program import Program
from xform._stages._slots import padded, part_of, places, slots_of
from xform._stages._stage import Stage
from xform._stages._vary import axes_of, vary

LINK = 2000.0
"""FLOPs in the time in which one byte is sent, of an H200 in bfloat16 over NVLink."""


class Stages:
    """A model in stages. It prints as a table.

    Attributes:
      rows: what each stage costs and sends.
      stage: for each stage, `stage(weights, x, batch) -> x`; those that are alike are one function.
      first: `first(shared, batch) -> x`, of zeros: all work is in the stages.
      last: `last(shared, x, batch) -> loss`.
    """

    def __init__(self, program: Program, cuts: Sequence[int]):
        self._program = program
        bounds = list(zip([0, *cuts], [*cuts, len(program.units)], strict=True))
        self._pieces = [program.pieces(*bound) for bound in bounds]
        self._slots, self._at = slots_of(program, self._pieces)
        self._cuts = tuple(cuts)
        crossing = [program.crossing(cut) for cut in cuts]
        self._x_at = self._travels(program)[1]
        edges = [([], []), *zip(crossing, self._x_at, strict=True), ([], [])]
        made: dict[Any, Callable] = {}
        self.stage: list[Callable] = []
        for s, bound in enumerate(bounds):
            where = [self._at[s][piece] for piece in self._pieces[s]]
            function = Stage(program, bound, self._pieces[s], where, edges[s], edges[s + 1])
            self.stage.append(made.setdefault(function.key, function))
        self.rows = [
            program.row(*bound, self._pieces[s]) for s, bound in enumerate(bounds)
        ]  # fmt: skip

    def first(self, shared, batch) -> list:
        """What the first stage is given: zeros."""
        del shared
        here = self._program.here(batch)
        types, at = self._travels(here)
        if at != self._x_at:
            raise ValueError(
                "what travels between stages has shapes of its own where it runs: cut the model "
                "for a microbatch as a device has it."
            )
        loss: Any = here.jaxpr.out_avals[0]
        return [vary(jnp.zeros(t.shape, t.dtype), batch) for t in (loss, *types)]

    def _travels(self, program: Program) -> tuple[list, list[list[int]]]:
        """Types of slots for what travels, and which of them each cut uses."""
        types = [[v.aval for v in program.crossing(cut)] for cut in self._cuts]
        return places(types)

    def last(self, shared, x: Sequence, batch):
        """The share in the loss: what devices with other rows found, added up."""
        del shared
        axes = tuple(sorted(varying_axes(x[0]) & axes_of(batch, but={"pp"})))
        return lax.psum(x[0], axes) if axes else x[0]

    def split(self, params) -> list:
        """Returns the weights of all stages: for each slot an array with a leading dim for them.

        Args:
          params: the parameters, as they were traced.
        """
        leaves = jax.tree.leaves(params)
        count, weights = len(self.stage), []
        for i, slot in enumerate(self._slots):
            rows = [jnp.zeros(slot.shape, slot.dtype)] * count
            for s, at in enumerate(self._at):
                for piece, where in at.items():
                    if where == i:
                        rows[s] = padded(part_of(leaves[piece.leaf], piece), slot)
            weights.append(jnp.stack(rows))
        return weights

    def join(self, weights: Sequence) -> Any:
        """Returns a tree as that of the parameters from gradients of `split`'s result, added up.

        Of parameters that have no gradient there is None, as in what executors return.
        """
        program = self._program
        leaves: list[Any] = [
            jnp.zeros(t.shape, jnp.promote_types(t.dtype, jnp.float32))
            if jnp.issubdtype(t.dtype, jnp.inexact) else None
            for t in program.params
        ]  # fmt: skip
        for s, at in enumerate(self._at):
            for piece, where in at.items():
                if leaves[piece.leaf] is None or weights[where] is None:
                    continue
                mine = weights[where][s]
                if not piece.layered:
                    leaves[piece.leaf] = leaves[piece.leaf] + mine
                else:
                    there = leaves[piece.leaf].at[piece.start : piece.stop]
                    leaves[piece.leaf] = there.add(mine[: piece.stop - piece.start])
        return jax.tree.unflatten(program.params_tree, leaves)

    @property
    def tied(self) -> list[str]:
        """The parameters that several stages use."""
        seen = Counter(piece for pieces in self._pieces for piece in pieces)
        names = {self._program.names[p.leaf] for p, n in seen.items() if n > 1}
        return sorted(names)

    def __str__(self):
        total = sum(row.cost for row in self.rows) or 1.0
        lines = [
            f"stage {s}: {row.cost / total:6.1%} of {total:.3g} FLOPs, {row.parameters:,} "
            f"parameters, sends {row.sent:,} bytes: {row.first} … {row.last}"
            for s, row in enumerate(self.rows)
        ]
        return "\n".join([*lines, *[f"used by several: {', '.join(self.tied)}"] * bool(self.tied)])

    __repr__ = __str__


def stages(
    f: Callable, count: int | None = None, *, at: str | None = None, link: int | float = LINK
) -> Callable[..., Stages]:
    """Returns a function that cuts a model into the stages of a pipeline.

    Args:
      f: `f(params, batch) -> loss`, of one microbatch; the losses of microbatches are added up. It
        is called as on one device.
      count: how many stages, of which the dearest is made as cheap as can be.
      at: instead, cuts after each `jax.ad_checkpoint.checkpoint_name(x, at)` of this name.
      link: how many FLOPs a byte costs that is sent.

    Returns:
      A function of the arguments of `f`, or of their types, that returns `Stages`: what
      `xform.sharding.pipeline`'s executors take. Where batches are split over devices, each has
      the loss of its rows, and these are added up as those of microbatches are.

    Raises:
      ValueError: from it, where there are fewer places to cut than wanted, or no such mark, or one
        inside a loop; or `f` returns anything but a number.

    >>> def loss(params, batch):
    ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
    ...     return jnp.sum(jax.lax.scan(layer, batch @ params["in"], params["layers"])[0])
    >>> params = {"in": jnp.ones((4, 8)), "layers": jnp.ones((6, 8, 8))}
    >>> cut = stages(loss, 3, link=0)(params, jnp.ones((2, 4)))
    >>> [weights.shape for weights in cut.split(params)]
    [(3, 4, 8), (3, 2, 8, 8)]
    """
    if (count is None) == (at is None):
        raise ValueError("`stages` needs a number of stages or `at=`, the name of marks; not both.")

    def cut(params, batch) -> Stages:
        program = Program(f, params, batch)
        cuts = program.marks(at) if at else program.balanced(count or 0, float(link))
        return Stages(program, cuts)

    return cut
