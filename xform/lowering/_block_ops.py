"""The operations of a program over rows, on a block of rows.

Most are themselves on a block. Those whose parameters name a size get the block's, by the table
below; a position along rows starts where the block does. Results in 16 bits are rounded where the
program says so, and nowhere else: a compiler that carries a value in more bits to one reader than
to another would give it two values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.lowering._region import Lines, Region, type_of


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a region.

    Attributes:
      region: of which one.
      size: of each line that is rows, how many of it these are.
      start: of each, the first.
    """

    region: Region
    size: Mapping[int, int]
    start: Mapping[int, Any]

    def shape(self, v: Var | Literal) -> tuple[int, ...]:
        """Of a value of the program, in a block."""
        sizes = self.region.sizes
        lines = self.region.lines_of(v)
        return tuple(1 if k is None else self.size.get(k, sizes[k]) for k in lines)

    def starts(self, lines: Lines) -> list:
        """Where a block of a value begins."""
        return [jnp.int32(0 if k is None else self.start.get(k, 0)) for k in lines]

    def run(self, program: Jaxpr, args: Sequence, once: frozenset[Var] = frozenset()) -> list:
        """The results of the body or the end, of this block of its operands.

        Args:
          program: one of the two.
          args: blocks of its operands.
          once: the values of which there must be one, whatever reads them.
        """
        known: dict = dict(zip(program.invars, args, strict=True))
        read = lambda x: x.val if isinstance(x, Literal) else known[x]
        for eqn in program.eqns:
            outs = self._apply(eqn, [read(x) for x in eqn.invars])
            for v, x in zip(eqn.outvars, outs, strict=True):
                known[v] = lax.optimization_barrier(x) if v in once else x
        return [read(x) for x in program.outvars]

    def _apply(self, eqn: JaxprEqn, args: Sequence) -> list:
        rule = _RULES.get(eqn.primitive.name)
        outs = rule(self, eqn, *args) if rule else eqn.primitive.bind(*args, **eqn.params)
        outs = list(outs) if eqn.primitive.multiple_results else [outs]
        return outs if eqn.primitive.name in EXACT else [_rounded(x) for x in outs]


EXACT = frozenset(
    (
        *("neg", "abs", "sign", "max", "min", "select_n", "clamp", "copy", "copy_p", "name"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "pad", "concatenate"),
        *("split", "iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"),
        *("reduce_max", "reduce_min", "reduce_and", "reduce_or", "optimization_barrier"),
        *("stop_gradient", "reduce_precision", "bitcast_convert_type", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic", "population_count", "pcast", "pvary"),
        *("clz", "is_finite", "floor", "ceil", "round"),
    )
)
"""Operations that round nothing: done twice, they give the same bits."""


def _rounded(x):
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize != 2:
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _broadcast(block: Block, eqn: JaxprEqn, x):
    return lax.broadcast_in_dim(x, block.shape(eqn.outvars[0]), eqn.params["broadcast_dimensions"])


def _reshape(block: Block, eqn: JaxprEqn, x):
    return lax.reshape(x, block.shape(eqn.outvars[0]))


def _iota(block: Block, eqn: JaxprEqn):
    (out,), dim = eqn.outvars, eqn.params["dimension"]
    here = lax.broadcasted_iota(type_of(out).dtype, block.shape(out), dim)
    first = block.start.get(block.region.lines_of(out)[dim], 0)
    return here + jnp.asarray(first).astype(here.dtype)


def _slice(block: Block, eqn: JaxprEqn, x):
    (out,), params = eqn.outvars, eqn.params
    same = [n == m for n, m in zip(type_of(eqn.invars[0]).shape, type_of(out).shape, strict=True)]
    pick = lambda mine, theirs: [a if s else b for s, a, b in zip(same, mine, theirs, strict=True)]
    strides = params["strides"] or [1] * x.ndim
    return lax.slice(
        x, pick([0] * x.ndim, params["start_indices"]), pick(x.shape, params["limit_indices"]),
        pick([1] * x.ndim, strides),
    )  # fmt: skip


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "iota": _iota,
    "slice": _slice,
}
"""Of the operations whose parameters name sizes."""
