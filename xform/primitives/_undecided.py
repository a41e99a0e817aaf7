"""What of a mask the analysis of tiles can't decide, and what that costs: a part of `which`.

A tile that is decided neither by proof nor at its corners (see `block_map`) is evaluated pair by
pair. A few such tiles are looked at closely: every operation of the mask runs there on all pairs,
and beside that in interval arithmetic. To blame are the first ones whose operands are known well
and whose result is not: its interval is wider than its values (`q * q - q`, a loop), or the corners
do not have its extremes (`%`, a sine, random bits, ids in any order).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.interpreters import partial_eval as pe

from xform._compat import Jaxpr, JaxprEqn, user_frames
from xform.jaxpr import eqn_rule, interpret, source_line, walk
from xform.jaxpr._walk import UNKNOWN
from xform.primitives._intervals import RULES, Interval, default, ordered, unknown
from xform.primitives._reads import READS
from xform.primitives.block_map import block_map, undecided

# Tiles that are looked at closely.
_SAMPLES = 4
# Operations as they are written.
_WRITTEN = {
    "remainder": "%", "rem": "%", "floor_divide": "//", "and": "&", "or": "|", "xor": "^",
    "not": "~", "mul": "*", "add": "+", "sub": "-", "eq": "==", "ne": "!=",
    "dynamic_slice": "array[index]", "gather": "array[index]",
}  # fmt: skip
_OBJECT = re.compile(r"(?:.*\.)?([a-zA-Z]\w*)\.__call__")


def remark(mask: Callable, *, maps: int, q_len: int, kv_len: int, q_tile: int, kv_tile: int) -> str:
    """Returns in words what of a mask is evaluated pair by pair, why, and the cost; "" if nothing.

    It is counted for the first batch entry and head. Where the mask reads traced arrays, there is
    nothing to count: what may need it is named, and so are reads of arrays that do if their values
    come in no order.

    Args:
      mask: the user's.
      maps: how many maps a call makes, for different batch entries and heads.
      q_len, kv_len, q_tile, kv_tile: as of `block_map`.

    >>> sizes = {"q_len": 64, "kv_len": 64, "q_tile": 16, "kv_tile": 16}
    >>> remark(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, maps=1, **sizes)
    ''
    >>> said = remark(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 1, maps=2, **sizes)
    >>> "`%` (at " in said, "16 of 16 tiles" in said, "for each of 2 maps" in said
    (True, True, True)
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.make_jaxpr(mask)(*[index] * 4)
    if any(isinstance(x, Tracer) for x in traced.consts):
        return _unknown(traced.jaxpr, traced.consts, maps * q_len * kv_len)
    program, captures = _with_captures_last(traced.jaxpr), tuple(traced.consts)
    sizes: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len, "q_tile": q_tile, "kv_tile": kv_tile}
    some = partial(undecided, program, b=0, h=0, **sizes)
    tiles = np.asarray(jax.jit(lambda captures: some(captures))(captures))
    if not tiles.any():
        return ""
    at = np.argwhere(tiles)
    sampled = at[:: -(-len(at) // _SAMPLES)]
    blamed: dict[str, None] = {}
    for i, j in sampled:
        q = i * q_tile + np.arange(min(q_tile, q_len - i * q_tile))
        k = j * kv_tile + np.arange(min(kv_tile, kv_len - j * kv_tile))
        blamed |= dict.fromkeys(_blamed(program, captures, q, k))
    built = jax.jit(lambda captures: block_map(program, captures, b=0, h=0, **sizes))
    memory = built.lower(captures).compile().memory_analysis()
    scratch = "" if memory is None else f", in {_bytes(memory.temp_size_in_bytes)} of memory"
    pairs, ops = len(at) * q_tile * kv_tile, _count(program)
    return (
        f"in `mask_mod`, {_listed(blamed)}: {len(at):,} of {tiles.size:,} tiles of {q_tile} x "
        f"{kv_tile} are evaluated pair by pair before the call, {pairs:,} pairs of {ops} "
        f"operations each for each of {maps:,} maps{scratch}; that is {pairs / q_len / kv_len:.0%} "
        "of all pairs"
    )


def _with_captures_last(jaxpr: Jaxpr) -> Jaxpr:
    """A traced mask as the map takes it, `(b, h, q_idx, kv_idx, *captures)`, its lines kept."""
    invars, read = [*jaxpr.invars, *jaxpr.constvars], pe.convert_constvars_jaxpr(jaxpr)
    return read.replace(invars=invars)


def _count(jaxpr: Jaxpr) -> int:
    return sum(1 for _ in walk(jaxpr))


def _bytes(n: int) -> str:
    return f"{n / 1e6:.1f} MB"


def _listed(parts: Sequence[str] | dict[str, None]) -> str:
    return " and ".join(parts)


# ---- A closer look -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """A value at all pairs of a tile `[q,k,*shape]`, and the interval that is known of it."""

    at: Array
    bounds: Interval

    @property
    def flaw(self) -> str:
        """What is not known of it."""
        if not ordered(self.at.dtype):
            return "makes values without an order, such as random keys"
        at = np.asarray(self.at)
        corners = at[:: max(1, len(at) - 1), :: max(1, at.shape[1] - 1)]
        ends = [np.asarray(x[0, 0]) for x in (self.bounds.lo, self.bounds.hi)]
        least, most = at.min((0, 1)), at.max((0, 1))
        same = partial(np.allclose, rtol=1e-4, atol=1e-30)
        if at.dtype == bool or np.issubdtype(at.dtype, np.integer):
            same = np.array_equal
        if not (same(ends[0], least) and same(ends[1], most)):
            return "is known less well than what it is made of"
        if not (same(corners.min((0, 1)), least) and same(corners.max((0, 1)), most)):
            return "is not within a tile what it is at its corners"
        return ""


def _blamed(program: Jaxpr, captures: Sequence[Array], q: np.ndarray, k: np.ndarray) -> list[str]:
    """The first operations of whose results too little is known on the tile of `q` and `k`."""
    blamed: list[str] = []

    def look(rule: Callable | None) -> Callable:
        def run(eqn: JaxprEqn, *args):
            moving = [isinstance(x, _Value) for x in args]
            bind = partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
            if not any(moving):
                return bind(*args)
            over = tuple(0 if m else None for m in moving)
            at = jax.vmap(jax.vmap(bind, over), over)(*(_at(x) for x in args))
            of = [_bounds(x) for x in args]
            bounds = rule(*of, **eqn.params) if rule else default(eqn, *of)
            values = [_Value(*x) for x in zip(_list(at), _list(bounds), strict=True)]
            if not any(x.flaw for x in args if isinstance(x, _Value)):
                flaws = [flaw for x in values if (flaw := x.flaw)]
                blamed.extend(f"{_place(eqn)} {flaw}" for flaw in flaws[:1])
            return values if len(values) > 1 else values[0]

        return run

    def index(x, dim):
        full = jnp.broadcast_to(jnp.expand_dims(jnp.asarray(x, jnp.int32), 1 - dim), sizes)
        return _Value(full, Interval(full[:1, :1], full[-1:, -1:]))

    sizes = (len(q), len(k))
    rules = {key: eqn_rule(look(rule)) for key, rule in (RULES | READS).items()}
    run = interpret(program, rules, default=look(None))
    run(jnp.int32(0), jnp.int32(0), index(q, 0), index(k, 1), *captures)
    return blamed


def _list(x) -> list:
    return list(x) if isinstance(x, list | tuple) else [x]


def _at(x):
    return x.at if isinstance(x, _Value) else x


def _bounds(x):
    if not isinstance(x, _Value):
        return x
    return x.bounds if ordered(x.at.dtype) else unknown(x.at.shape[2:], x.at.dtype)


def _place(eqn: JaxprEqn) -> str:
    """An operation as it is written, and where: a line of the user's, or one of our masks."""
    name = eqn.params.get("name", eqn.primitive.name)
    return f"`{_WRITTEN.get(name, name)}` ({_where(eqn)})"


def _where(eqn: JaxprEqn) -> str:
    for frame in user_frames(eqn.source_info.traceback):
        if "xform/primitives/" not in frame.file_name:
            break
        if found := _OBJECT.fullmatch(frame.function_name):
            return f"in `{found[1]}`"
    line = source_line(eqn)
    return "where masks are combined" if line == UNKNOWN else f"at {line}"


# ---- Masks that read unknown arrays --------------------------------------------------------------


def _unknown(jaxpr: Jaxpr, consts: Sequence, pairs: int) -> str:
    """What might be evaluated pair by pair, of a mask whose arrays are traced."""
    lost: dict[str, None] = {}
    reads: dict[str, None] = {}

    def noted(rule: Callable | None) -> Callable:
        def run(eqn: JaxprEqn, *args):
            if not any(isinstance(x, Interval) for x in args):
                return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
            out = rule(*args, **eqn.params) if rule else default(eqn, *args)
            outs = out if isinstance(out, list) else [out]
            moving = any(isinstance(x, Interval) and x.tiles != (1, 1) for x in args)
            if moving and eqn.primitive in (lax.dynamic_slice_p, lax.gather_p):
                reads[_place(eqn)] = None
            # What follows the tiles and comes out the same for all of them was given up.
            given_up = moving and all(x.tiles == (1, 1) for x in outs)
            if given_up or eqn.params.get("name", eqn.primitive.name) in ("remainder", "rem"):
                lost[_place(eqn)] = None
            return out

        return run

    def run(*captures):
        sides = (jnp.zeros((2, 1), jnp.int32), jnp.zeros((1, 3), jnp.int32))
        q, k = (Interval(x, x + 9) for x in sides)
        rules = {key: eqn_rule(noted(rule)) for key, rule in (RULES | READS).items()}
        flat = pe.convert_constvars_jaxpr(jaxpr)
        interpret(flat, rules, default=noted(None))(*captures, jnp.int32(0), jnp.int32(0), q, k)

    jax.eval_shape(run, *consts)  # nothing is computed
    why = [f"{_listed(lost)} may not be known well enough"] if lost else []
    if sorted_at_best := {place: None for place in reads if place not in lost}:
        why.append(f"{_listed(sorted_at_best)} is known well only if the values come in order")
    if not why:
        return ""
    return (
        f"in `mask_mod`, {', and '.join(why)}: tiles that nothing else decides are evaluated pair "
        f"by pair before the call, up to {pairs:,} pairs (it reads traced arrays, so that they "
        "can't be counted here)"
    )
