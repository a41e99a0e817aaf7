"""A mod split in two: what belongs to a row or a column, and what belongs to a pair.

A kernel evaluates a mod at every pair (query, key), in the time that the tensor cores take for two
products. What depends on the query alone, on the key alone, or on a difference that takes a look
into a table, is therefore computed once, outside, by XLA, and reaches the kernel as an *operand*: a
scalar per head, a vector over rows or columns, or a band over `q_idx - kv_idx`. Only the rest, the
*tile program*, runs inside, on whole tiles at a time. Gathers and integer divisions by and large
disappear with it.

    score - slopes[h] * (q - k)        operand: slopes[h], a scalar        inside: sub, mul, sub
    ids[q] == ids[k]                   operands: a row, a column           inside: eq
    score + table[bucket(q - k)]       operand: a band                     inside: add
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import partial_eval as pe

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from xform.jaxpr import eqn_rule, intern, interpret, source_line
from xform.lowering._spec import Read
from xform.lowering.mosaic_gpu._ops import OPS

SCALAR, ROW, COL, BAND, TILE = "", "q", "k", "q-k", "qk"
"""What a value may depend on beside the head: nothing, the query, the key, their difference, both.
"""

# Worth a vector of its own, where it depends on the difference of the indices alone.
_CHEAP = {
    "abs", "add", "and", "clamp", "convert_element_type", "eq", "ge", "gt", "integer_pow", "le",
    "lt", "max", "min", "mul", "ne", "neg", "not", "or", "select_n", "sign", "square", "sub", "xor",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Class:
    """What a value depends on.

    Attributes:
      heads: those of "bh".
      pair: one of `SCALAR`, `ROW`, `COL`, `BAND`, `TILE`.
      affine: whether the value is an index of `pair` plus something that no index changes.
    """

    heads: str = ""
    pair: str = SCALAR
    affine: bool = False

    def join(self, other: Class) -> Class:
        heads = "".join(x for x in "bh" if x in self.heads + other.heads)
        pairs = {self.pair, other.pair} - {SCALAR}
        return Class(heads, pairs.pop() if len(pairs) == 1 else TILE if pairs else SCALAR)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One value that is computed outside of the kernel.

    Attributes:
      heads: those of "bh" that it differs along.
      pair: `SCALAR`, `ROW`, `COL` or `BAND`.
      dtype: what the tile program takes it as.
    """

    heads: str
    pair: str
    dtype: jnp.dtype

    @property
    def stored(self) -> jnp.dtype:
        """The 32-bit dtype that holds it in memory."""
        if jnp.issubdtype(self.dtype, jnp.floating):
            return jnp.dtype(jnp.float32)
        unsigned = jnp.issubdtype(self.dtype, jnp.unsignedinteger)
        return jnp.dtype(jnp.uint32 if unsigned else jnp.int32)


@dataclasses.dataclass(frozen=True)
class TileProgram:
    """A mod, split.

    Attributes:
      jaxpr: `(score?, q, k, float(q), float(k), *operands) -> outs`, elementwise, on scalars.
      operands: what it takes beside the indices.
      outside: `(b, h, q, k, *arrays) -> operands`, the scalar program of all operands.
      pair: what `out` depends on, `TILE` for a score.
    """

    jaxpr: Jaxpr
    operands: tuple[Operand, ...]
    outside: Callable
    pair: str

    @functools.cached_property
    def indices(self) -> tuple[set, set]:
        """As what the program takes the query's index, and the key's: int32, float32 or neither."""
        used = {v for eqn in self.jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
        used |= {v for v in self.jaxpr.outvars if isinstance(v, Var)}
        first = len(self.jaxpr.invars) - len(self.operands) - 4
        q, k, q_float, k_float = self.jaxpr.invars[first : first + 4]
        kinds = lambda i, f: {t for t, v in ((jnp.int32, i), (jnp.float32, f)) if v in used}
        return kinds(q, q_float), kinds(k, k_float)

    def arrays(
        self, arrays: Sequence, batch: int, heads: int, origin, rows, cols
    ) -> list[jax.Array]:
        """Computes the operands.

        Args:
          arrays: what the mod reads: context, or captures and context.
          batch, heads: B and H.
          origin: the b and h of the first.
          rows, cols: int32, the true indices of all rows and columns, those of the padding
            clipped.

        Returns:
          `[B or 1, H or 1]` for a scalar, with one more dimension for a row, a column, or a band
          (`rows + cols` long, from `-(len(cols) - 1)` on), each in its stored dtype.
        """
        differences = jnp.arange(1 - len(cols), len(rows) + 1, dtype=jnp.int32)
        zero = jnp.zeros((), jnp.int32)
        sides = {ROW: (rows, zero), COL: (zero, cols), BAND: (differences, zero)}
        return [
            self._array(
                n, operand, arrays, (batch, heads), origin, sides.get(operand.pair, (zero, zero))
            )
            for n, operand in enumerate(self.operands)
        ]

    def _array(self, n: int, operand: Operand, arrays, sizes, origin, side):
        """Operand `n` at all indices that it depends on."""
        f = lambda b, h, q, k: self.outside(b, h, q, k, *arrays)[n].reshape(())
        if operand.pair != SCALAR:
            f = jax.vmap(f, in_axes=(None, None, *(0 if x.ndim else None for x in side)))
        index = []
        for dim, name in ((1, "h"), (0, "b")):
            f = jax.vmap(f, in_axes=tuple(0 if d == dim else None for d in range(4)))
            count = sizes[dim] if name in operand.heads else 1
            index.insert(0, origin[dim] + jnp.arange(count, dtype=jnp.int32))
        return f(*index, *side).astype(operand.stored)


def derivatives(jaxpr: Jaxpr, wanted: Sequence[int]) -> Jaxpr:
    """Of a score mod: its value, its derivative by the score, and by some of what it loads.

    Args:
      jaxpr: `(score, b, h, q, k, *loaded) -> score`.
      wanted: which of `loaded`.

    Raises:
      NotImplementedError: for a derivative by more than one number.
    """
    if any(_aval(jaxpr.invars[5 + n]).size != 1 for n in wanted):
        raise NotImplementedError("the gradient of an array that a pair reads several numbers of")
    moving = [0, *(5 + n for n in wanted)]

    def program(*args):
        def along(*values):
            own = dict(zip(moving, values, strict=True))
            (out,) = jaxpr_as_fun(jaxpr)(*(own.get(n, x) for n, x in enumerate(args)))
            return out

        out, pull_back = jax.vjp(along, *(args[n] for n in moving))
        return out, *(x.reshape(()) for x in pull_back(jnp.ones_like(out)))

    structs = [jax.ShapeDtypeStruct(_aval(v).shape, _aval(v).dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(program)(*structs).jaxpr


def split(jaxpr: Jaxpr, *, score: bool, reads: Sequence[Read] | None = None) -> TileProgram:
    """Splits a mod.

    Args:
      jaxpr: `(b, h, q, k, *arrays) -> out` for a mask, `(score, b, h, q, k, *loaded) -> scores`.
      score: whether it is a score mod.
      reads: what each of `loaded` is.

    Raises:
      NotImplementedError: lists all that has no form inside a kernel.
    """
    flat = _flatten(jaxpr)
    index = [Class("b"), Class("h"), Class("", ROW, True), Class("", COL, True)]
    loaded = [class_of_read(read) for read in reads or ()]
    arrays = loaded if score else [Class()] * (len(flat.invars) - 4)
    classes = _classify(flat, [Class("", TILE)] * score + index + arrays)
    return _Splitter(flat, score, classes, tuple(reads or ())).result()


class _Splitter:
    """Decides for each equation on which side it runs, and builds the two programs."""

    def __init__(self, jaxpr: Jaxpr, score: bool, classes: dict[Var, Class], reads):
        self.jaxpr, self.score, self.classes, self.reads = jaxpr, score, classes, reads
        self.indices = jaxpr.invars[score : score + 4]
        self.inside = [eqn for eqn in jaxpr.eqns if self._is_inside(eqn)]
        needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
        for eqn in reversed(self.inside):
            if not needed.isdisjoint(eqn.outvars):
                needed |= {v for v in eqn.invars if isinstance(v, Var)}
        self.inside = [eqn for eqn in self.inside if not needed.isdisjoint(eqn.outvars)]
        made = {v for eqn in self.inside for v in eqn.outvars} | set(self.indices[2:])
        made |= set(jaxpr.invars[:score])
        self.frontier = [v for v in self._order() if v in needed and v not in made]

    def _order(self) -> list[Var]:
        return [*self.jaxpr.invars, *(v for eqn in self.jaxpr.eqns for v in eqn.outvars)]

    def _is_inside(self, eqn: JaxprEqn) -> bool:
        """Whether an equation runs at every pair of a tile; so do conversions of an index."""
        pair = self.classes[eqn.outvars[0]].pair
        if pair == BAND:
            return not self._expensive(eqn)
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] in self.indices:
            return True
        return pair == TILE

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def _expensive(self, eqn: JaxprEqn) -> bool:
        """Whether a function of the difference holds more than a few cheap operations."""
        if eqn.primitive.name not in _CHEAP:
            return True
        inner = (v for v in eqn.invars if isinstance(v, Var) and self.classes[v].pair == BAND)
        return any(v not in self._makers or self._expensive(self._makers[v]) for v in inner)

    def result(self) -> TileProgram:
        self._check()
        operands = tuple(
            Operand(c.heads, c.pair, _aval(v).dtype)
            for v, c in ((v, self.classes[v]) for v in self.frontier)
        )
        out = self.jaxpr.outvars[0]
        pair = self.classes[out].pair if isinstance(out, Var) else SCALAR
        return TileProgram(self._tile_jaxpr(), operands, self._outside(), pair)

    def _check(self) -> None:
        wrong = [
            f"`{eqn.primitive.name}` of a query and a key together (at {source_line(eqn)})"
            for eqn in self.inside
            if eqn.primitive.name not in OPS or any(_aval(v).size != 1 for v in eqn.outvars)
        ]
        wrong += [
            f"a read of an array at an index that mixes query and key ({self.classes[v]})"
            for v in self.frontier
            if self.classes[v].pair == TILE
        ]
        wrong += [
            f"a value of dtype {_aval(v).dtype}"
            for v in self._order()
            if _aval(v).dtype.itemsize > 4 or jnp.issubdtype(_aval(v).dtype, jnp.complexfloating)
        ]
        if wrong:
            raise NotImplementedError("; ".join(dict.fromkeys(wrong)))

    def _tile_jaxpr(self) -> Jaxpr:
        """What runs inside, without what it does not need."""
        pair = self.indices[2:]
        head = [*self.jaxpr.invars[: self.score], *pair]

        def program(*args):
            n = len(head)
            env = dict(zip(head, args[:n], strict=True))
            for v, x in zip(self.frontier, args[n + 2 :], strict=True):
                env[v] = x.reshape(_aval(v).shape)
            floats = dict(zip(pair, args[n : n + 2], strict=True))
            value = lambda v: v.val if isinstance(v, Literal) else env[v]
            for eqn in self.inside:
                out = self._in_float(eqn, floats)
                if out is None:
                    params = eqn.primitive.get_bind_params(eqn.params)
                    out = eqn.primitive.bind(*map(value, eqn.invars), **params)
                out = out if eqn.primitive.multiple_results else [out]
                env.update(zip(eqn.outvars, out, strict=True))
            return list(map(value, self.jaxpr.outvars))

        struct = lambda v: jax.ShapeDtypeStruct((), _aval(v).dtype)
        float_index = jax.ShapeDtypeStruct((), jnp.float32)
        jaxpr = jax.make_jaxpr(program)(
            *map(struct, head), float_index, float_index, *map(struct, self.frontier)
        )
        jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(self.jaxpr.outvars), instantiate=True)
        return intern(jaxpr)

    def _in_float(self, eqn: JaxprEqn, floats: dict):
        """An index, or the difference of two, converted to float32: made there from the start.

        Exact, since a kernel's indices are below 2**24, and so are the differences.
        """
        source = eqn.invars[0]
        if eqn.primitive is not lax.convert_element_type_p or not isinstance(source, Var):
            return None
        if eqn.params["new_dtype"] != jnp.float32:
            return None
        if source in floats:
            return floats[source]
        maker = self._makers.get(source)
        if maker is None or maker.primitive is not lax.sub_p or set(maker.invars) != set(floats):
            return None
        x, y = (floats[v] for v in maker.invars)
        return x - y

    def _outside(self) -> Callable:
        """`(b, h, q, k, *arrays)`: for a score mod, arrays are captures by read, then context."""
        frontier, reads, score = self.frontier, self.reads, self.score
        inside = {v for eqn in self.inside for v in eqn.outvars}
        eqns = [eqn for eqn in self.jaxpr.eqns if inside.isdisjoint(eqn.outvars)]
        eqns = [e for e in self.jaxpr.eqns if e in eqns or self.classes[e.outvars[0]].pair == BAND]
        needed = set(frontier)
        for eqn in reversed(eqns):
            if not needed.isdisjoint(eqn.outvars):
                needed |= {v for v in eqn.invars if isinstance(v, Var)}
        eqns = [eqn for eqn in eqns if not needed.isdisjoint(eqn.outvars)]

        def outside(b, h, q, k, *arrays):
            if score:
                captures, context = arrays[: len(reads)], arrays[len(reads) :]
                arrays = [
                    load_one(read, x, b, h, q, k, context) if v in needed else None
                    for read, x, v in zip(reads, captures, self.jaxpr.invars[5:], strict=True)
                ]
            env = dict(zip(self.jaxpr.invars[score:], (b, h, q, k, *arrays), strict=True))
            value = lambda v: v.val if isinstance(v, Literal) else env[v]
            for eqn in eqns:
                params = eqn.primitive.get_bind_params(eqn.params)
                out = eqn.primitive.bind(*map(value, eqn.invars), **params)
                out = out if eqn.primitive.multiple_results else [out]
                env.update(zip(eqn.outvars, out, strict=True))
            return [env[v] for v in frontier]

        return outside


def load_one(read: Read, capture, b, h, q, k, context):
    """What a scalar evaluation of the mod reads, floating numbers widened."""
    starts = None
    if read.index is not None:
        starts = jaxpr_as_fun(read.index)(b, h, q, k, *context)[0]
    value = dataclasses.replace(read, dims="").load(capture, starts)
    return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value


def class_of_read(read: Read) -> Class:
    """What a read of a captured array depends on."""
    if read.index is None:
        return Class()
    index = [Class("b"), Class("h"), Class("", ROW, True), Class("", COL, True)]
    flat = _flatten(read.index)
    classes = _classify(flat, index + [Class()] * (len(flat.invars) - 4))
    out = flat.outvars[0]
    return dataclasses.replace(classes[out], affine=False) if isinstance(out, Var) else Class()


def _classify(jaxpr: Jaxpr, classes: Sequence[Class]) -> dict[Var, Class]:
    known = dict(zip(jaxpr.invars, classes, strict=True))
    of = lambda v: known[v] if isinstance(v, Var) else Class()
    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        joint = functools.reduce(Class.join, operands, Class())
        name = eqn.primitive.name
        pairs = {x.pair for x in operands if x.affine}
        if name == "sub" and all(x.affine for x in operands) and pairs == {ROW, COL}:
            joint = Class(joint.heads, BAND)
        elif name in ("add", "sub") and len(pairs) == 1 and operands[0].affine:
            joint = dataclasses.replace(joint, affine=operands[1].pair == SCALAR)
        elif name == "add" and len(pairs) == 1 and operands[1].affine:
            joint = dataclasses.replace(joint, affine=operands[0].pair == SCALAR)
        known.update(dict.fromkeys(eqn.outvars, joint))
    return known


def _aval(v: Var | Literal) -> ShapedArray:
    assert isinstance(v.aval, ShapedArray)
    return v.aval


def _bind(eqn: JaxprEqn, *args):
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def _flatten(jaxpr: Jaxpr) -> Jaxpr:
    """The same program without calls; of a `cond`, both branches and a choice between them."""

    def choose(eqn: JaxprEqn, which, *args):
        results = [jaxpr_as_fun(branch)(*args) for branch in eqn.params["branches"]]
        which = jnp.clip(which.astype(jnp.int32), 0, len(results) - 1)
        pick = lambda *xs: functools.reduce(
            lambda out, ix: jnp.where(which == ix[0], ix[1], out), enumerate(xs[1:], 1), xs[0]
        )
        return [pick(*xs) for xs in zip(*results, strict=True)]

    run = interpret(jaxpr, {"cond": eqn_rule(choose)}, default=_bind)
    structs = [jax.ShapeDtypeStruct(_aval(v).shape, _aval(v).dtype) for v in jaxpr.invars]
    flat = jax.make_jaxpr(run)(*structs)
    # Branches and derivatives by name may hold calls of their own.
    again = jax.make_jaxpr(interpret(flat, {}, default=_bind))(*structs)
    return again.jaxpr if hasattr(again, "jaxpr") else again
