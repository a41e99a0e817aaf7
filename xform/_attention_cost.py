"""What attention costs: the tiles that its mask leaves, counted before anything runs.

`flex_attention` and its derivatives are one equation each, whose program runs one step for each
live tile. Which tiles are live is the block map's to say, and here it is asked at once: exactly
where the mask reads no arrays or only known ones, else within bounds (an unknown array holds any
value, so that `causal() & documents(ids)` is at most causal). The step itself is counted from the
program of the blockwise lowering, so that a count is of what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval as pe

from xform._amount import constant, exact
from xform._compat import Jaxpr, Var, jaxpr_as_fun
from xform._cost_rules import RULES, Work, aval
from xform._program import Node, content
from xform.jaxpr import walk
from xform.lowering import blockwise
from xform.lowering._spec import EMPTY, FULL, PARTIAL, At, Spec
from xform.lowering._tile_fn import COL, ROW, Attend, TileFn, primal, tile_aval
from xform.primitives import attention, tile_sum
from xform.primitives._choose import Device
from xform.primitives._intervals import unknown
from xform.primitives.block_map import block_map

# No more pairs than this are asked one by one.
_PAIRS = 2**31
# What is counted is one device's, whatever mesh is around.
_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclass(frozen=True)
class AttentionFlops:
    """FLOPs of one attention's matrix products, forward or backward, by four conventions.

    Attributes:
      line: the user's.
      full: over all T × S pairs, as if nothing were masked.
      model: what MFU counts: half of `full` if the mask is causal, whatever else it hides, else all
        of it; in a backward pass without the scores that it computes again.
      exact: over the pairs that the mask leaves; None if it reads arrays whose content is not
        known.
      tiles: over the tiles that run: what HFU counts. Where the mask reads unknown arrays, at most.
      recompute: the part of `tiles` that computes again what the forward pass had.
      causal: whether no query sees a later key.
      kind: what is multiplied, "bfloat16".
    """

    line: str
    full: int | Fraction
    model: int | Fraction
    exact: int | Fraction | None
    tiles: int | Fraction
    recompute: int | Fraction
    causal: bool
    kind: str = "float32"


@dataclass(frozen=True)
class _Call:
    """The parts of one attention equation, forward or any derivative."""

    spec: Spec
    fn: TileFn
    hidden: int
    rows: jax.ShapeDtypeStruct
    cols: jax.ShapeDtypeStruct
    operands: Sequence[jax.ShapeDtypeStruct]
    n_operands: int
    large: bool

    @classmethod
    def of(cls, node: Node) -> _Call:
        params = node.eqn.params
        avals = _types(node)
        if node.name == "flex_attention":
            spec = params["spec"]
            n = 3 + len(spec.reads)
            return cls(spec, Attend(spec), params["hidden"], avals[0], avals[1], avals, n, False)
        fn = params["fn"]
        first = lambda kind: avals[fn.operands.index(kind)]
        large = any(
            kind not in (ROW, COL) and math.prod(shape) > blockwise._LARGE
            for kind, (shape, _) in zip(fn.results, params["outs"], strict=True)
        )
        n = len(fn.operands)
        return cls(fn.spec, fn, params["hidden"], first(ROW), first(COL), avals, n, large)

    @property
    def context(self) -> Sequence[jax.ShapeDtypeStruct]:
        return self.operands[self.n_operands :]

    def plan(self):
        """Units and the two sides, as the lowering cuts them."""
        return blockwise._plan(
            self.spec, self.hidden, self.rows, self.cols, self.operands, self.context, self.large
        )


def attention_work(
    node: Node, price: Callable[[Jaxpr, Sequence], Work]
) -> tuple[Work, Work, AttentionFlops]:
    """Returns the work at least and at most done, and the same by convention.

    Args:
      node: a `flex_attention` or `tile_sum`.
      price: `price(jaxpr, trips)`, the work of a program whose while loops run as often as `trips`
        says, in order.
    """
    call = _Call.of(node)
    if any(0 in x.shape for x in (call.rows, call.cols)):
        none = AttentionFlops(node.line, 0, 0, 0, 0, 0, False)
        return Work(), Work(), none
    units, row, col = call.plan()
    heads = math.prod(units.sizes) * units.group
    mask = _Mask(call, row.length, col.length, node)
    program = attention_program(node)
    loops = _loops(program)
    lines = (row if _outer(call.fn) == ROW else col).count
    share = Fraction(1) if call.fn == Attend(call.spec) else 1 - _recomputed(call)
    pairs = heads * row.length * col.length
    # Each loop once, over partial and over full tiles, is two tiles of each line; no loop is all.
    area = 2 * row.tile * col.tile * lines if loops else row.padded * col.padded
    per_pair = Fraction(constant(price(program, [1] * loops).matrix), heads * area)
    if loops:
        kinds = mask.tiles(row.tile, col.tile)
        mean = lambda code: exact(Fraction(int(np.sum(kinds == code)), len(kinds) * lines))
        high = price(program, [mean(PARTIAL), mean(FULL)])
        low = high if mask.known else price(program, [0, mean(FULL)])
    else:
        low = high = price(program, [])
    causal = mask.causal
    seen = mask.visible(row.tile, col.tile) if mask.known else None
    flops = AttentionFlops(
        line=node.line,
        full=exact(per_pair * pairs),
        model=exact(per_pair * pairs * share / (2 if causal else 1)),
        exact=None if seen is None else exact(per_pair * heads * seen),
        tiles=constant(high.matrix),
        recompute=exact(constant(high.matrix) * (1 - share)),
        causal=causal,
        kind=high.kind or call.spec.dtype.name,
    )
    return low, high, flops


def _outer(fn: TileFn) -> str:
    return COL if COL in fn.results else ROW


def attention_program(node: Node) -> Jaxpr:
    """The program that the blockwise lowering makes of an attention equation."""
    return _program(node.eqn.primitive, tuple(node.eqn.params.items()), tuple(_types(node)))


def _types(node: Node) -> list[jax.ShapeDtypeStruct]:
    """The types of the operands. Values that differ by dimensions of one element may be one."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval, node.eqn.invars)]


@functools.lru_cache(maxsize=64)
def _program(primitive, params: tuple, avals: tuple) -> Jaxpr:
    """The program of the lowering."""
    module = attention if primitive is attention.flex_attention_p else tile_sum
    call = dict(params)
    call |= {"outs": module._layouts(*avals, **call).results}
    call |= {"implementation": "blockwise"} if "implementation" in call else {}
    # The map's own loops, which run seldom, would count as loops over tiles.
    call |= {
        "kinds": functools.partial(block_map, exact=False),
        "device": Device("cpu", counted=True),
    }
    impl = functools.partial(module._impl, **call, origin=(0, 0))
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.make_jaxpr(impl)(*avals)


def _loops(program: Jaxpr) -> int:
    """The loops over live tiles: two, over partial and over full ones, or none."""
    sites = (site for site in walk(program) if site.eqn.primitive.name == "while")
    return sum("while" not in dict(site.path) for site in sites)


# ---- the mask ------------------------------------------------------------------------------------


class _Mask:
    """The mask of one call, as far as it is known."""

    def __init__(self, call: _Call, rows: int, cols: int, node: Node):
        self.spec, self.hidden, self.rows, self.cols = call.spec, call.hidden, rows, cols
        values = node.ins[call.n_operands :]
        self.types = list(call.context)
        if self.spec.dropout:
            values, self.types = values[:-1], self.types[:-1]
        used = _used(self.spec.mask)
        self.arrays = [content(v) if i in used else None for i, v in enumerate(values)]
        self.known = all(self.arrays[i] is not None for i in used)
        self.batch = call.rows.shape[self.hidden] if "b" in self.spec.mask_dims else 1
        self.heads = call.rows.shape[self.hidden + 2] if "h" in self.spec.mask_dims else 1

    def _over_maps(self, f: Callable) -> np.ndarray:
        """`f(b, h, *context)` for each map that there is, along one leading dimension."""
        moving = tuple(x is not None for x in self.arrays)
        axes, sizes = [], []
        for d in range(self.hidden):
            full = [m and t.shape[d] > 1 for m, t in zip(moving, self.types, strict=True)]
            axes.append(tuple(0 if x else None for x in full))
            known = [t.shape[d] for x, t in zip(full, self.types, strict=True) if x]
            sizes.append(max(known, default=1))
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(_NO_MESH):
            indices = [jnp.arange(n, dtype=jnp.int32) for n in (self.batch, self.heads)]
            arrays = [
                unknown(t.shape[self.hidden :], t.dtype) if x is None else jnp.asarray(x)
                for x, t in zip(self.arrays, self.types, strict=True)
            ]
            # On one device, wherever they lie.
            args = jax.device_put((*indices, *arrays), jax.devices()[0])
        leaves, tree = jax.tree.flatten(args)
        types = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            run = _compiled(f, moving, tuple(axes), tuple(sizes), tree, types)
            out = np.asarray(run(*leaves))
        maps, each = out.shape[: self.hidden + 2], out.shape[self.hidden + 2 :]
        return out.reshape(math.prod(maps), *each)  # of no tiles at all, -1 would not tell

    def tiles(self, q_tile: int, kv_tile: int) -> np.ndarray:
        """The block maps `[maps, rows, cols]`."""
        return self._over_maps(_classify(self.spec.mask, self.rows, self.cols, q_tile, kv_tile))

    @functools.cached_property
    def causal(self) -> bool:
        """Whether every tile above the diagonal of a coarse map is proven empty."""
        if self.spec.mask is None or self.rows != self.cols or self.rows < 2:
            return False
        tile = max(1, self.rows // 8)
        kinds = self.tiles(tile, tile)
        return not np.triu(kinds != EMPTY, 1).any()

    def visible(self, q_tile: int, kv_tile: int) -> int | Fraction | None:
        """The pairs that the mask leaves of one head, the mean over heads; only mixed tiles run."""
        if self.spec.mask is None:
            return self.rows * self.cols
        kinds = self.tiles(q_tile, kv_tile)
        maps, full = len(kinds), int(np.sum(kinds == FULL))
        mixed = (kinds == PARTIAL).any(0)
        if int(mixed.sum()) * q_tile * kv_tile * maps > _PAIRS:
            return None
        program = jaxpr_as_fun(self.spec.mask)

        i, j = (x.astype(np.int32) for x in np.nonzero(mixed))

        def counts(b, h, *context):
            point = lambda q, k: program(b, h, q, k, *context)[0]

            def tile(ij):
                offset = lambda n: jnp.arange(n, dtype=jnp.int32)
                q, k = ij[0] * q_tile + offset(q_tile), ij[1] * kv_tile + offset(kv_tile)
                inside = (q < self.rows)[:, None] & (k < self.cols)[None]
                at = jnp.minimum(q, self.rows - 1), jnp.minimum(k, self.cols - 1)
                seen = jax.vmap(jax.vmap(point, (None, 0)), (0, None))(*at)
                return jnp.sum(seen & inside, dtype=jnp.int32)

            return jax.lax.map(tile, (i, j))

        found = self._over_maps(counts).astype(np.int64) * (kinds == PARTIAL)[:, mixed]
        return exact(Fraction(int(found.sum()) + full * q_tile * kv_tile, maps))


def _used(mask: Jaxpr | None) -> set[int]:
    """Which context arrays a mask reads."""
    if mask is None:
        return set()
    read = {id(v) for eqn in mask.eqns for v in eqn.invars} | {id(v) for v in mask.outvars}
    return {i for i, v in enumerate(mask.invars[4:]) if id(v) in read}


@functools.lru_cache(maxsize=256)
def _classify(mask: Jaxpr | None, rows: int, cols: int, q_tile: int, kv_tile: int) -> Callable:
    """The block map of one head; the same function for the same mask, so that it compiles once."""
    lengths: dict[str, Any] = dict(q_len=rows, kv_len=cols, q_tile=q_tile, kv_tile=kv_tile)
    return lambda b, h, *context: block_map(mask, context, b=b, h=h, **lengths)


@functools.lru_cache(maxsize=256)
def _compiled(
    f: Callable, moving: tuple, axes: tuple, sizes: tuple, tree, types: tuple
) -> Callable:
    """`f` over all heads, batches and hidden dimensions, of which known arrays have some.

    Compiled apart from its call: evaluation at trace time would fold what is constant in it one
    operation at a time, each a program of its own.
    """
    others = (None,) * len(moving)
    run = jax.vmap(jax.vmap(f, (None, 0, *others)), (0, None, *others))
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        run = _over_hidden(run, axis, moving, size)
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in types]
    flat = lambda *leaves: run(*jax.tree.unflatten(tree, leaves))
    return jax.jit(flat).lower(*structs).compile()


def _over_hidden(run: Callable, axes: tuple, moving: tuple, size: int) -> Callable:
    """`run` over one more leading dimension of the arrays that have it."""

    def outer(b, h, *arrays):
        each = zip(arrays, moving, axes, strict=True)
        arrays = [x[0] if m and axis is None else x for x, m, axis in each]
        if all(axis is None for axis in axes):
            return jnp.stack([run(b, h, *arrays)] * size)
        return jax.vmap(run, in_axes=(None, None, *axes))(b, h, *arrays)

    return outer


# ---- what a backward pass computes again ---------------------------------------------------------


def _recomputed(call: _Call) -> Fraction:
    """The share of a tile's products that read nothing but what the forward pass read."""
    at = At(jnp.int32(0), jnp.arange(1), jnp.arange(8), jnp.arange(8))
    shapes = [
        x.shape[call.hidden + 3 * (k in (ROW, COL)) :]
        for x, k in zip(call.operands, call.fn.operands, strict=False)
    ]
    tiles = [
        tile_aval(k, at, s, call.spec.wide) for k, s in zip(call.fn.operands, shapes, strict=True)
    ]
    context = [jax.ShapeDtypeStruct(x.shape[call.hidden :], x.dtype) for x in call.context]

    def run(tiles, context):
        key = context[-1] if call.spec.dropout else None
        context = context[:-1] if call.spec.dropout else context
        return call.fn(dataclasses.replace(at, context=context, key=key), *tiles)

    jaxpr = jax.make_jaxpr(run)(tiles, context)
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    given = jax.tree.leaves(
        [jax.tree.map(lambda _, p=p: p, t) for t, p in zip(tiles, primal(call.fn), strict=True)]
    )
    moving = {
        v for v, p in zip(jaxpr.invars, [*given, *[True] * len(context)], strict=True) if not p
    }
    again = total = 0
    for eqn in jaxpr.eqns:
        depends = any(v in moving for v in eqn.invars if isinstance(v, Var))
        moving.update(eqn.outvars if depends else ())
        if eqn.primitive.name == "contract":
            flops = constant(RULES["contract"](eqn).matrix)
            again, total = again + flops * (not depends), total + flops
    return Fraction(again, total) if total else Fraction(0)
