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
    score + bias[h, q, k]              operands: the array, its indices    inside: a load, add
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval as pe

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from xform.jaxpr import intern, source_line
from xform.lowering._spec import Read
from xform.lowering.mosaic_gpu._classes import (
    BAND,
    COL,
    INDICES,
    ROW,
    SCALAR,
    TILE,
    Class,
    aval_of,
    classify,
    flatten,
)
from xform.lowering.mosaic_gpu._lookup import Lookup, of_eqn, of_read
from xform.lowering.mosaic_gpu._ops import OPS
from xform.lowering.mosaic_gpu._scalars import scalars

# Worth a vector of its own, where it depends on the difference of the indices alone.
_CHEAP = {
    "abs", "add", "and", "clamp", "convert_element_type", "eq", "ge", "gt", "integer_pow", "le",
    "lt", "max", "min", "mul", "ne", "neg", "not", "or", "select_n", "sign", "square", "sub", "xor",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operand:
    """One value that is computed outside of the kernel, or an array that it reads.

    Attributes:
      heads: those of "bh" that it differs along.
      pair: `SCALAR`, `ROW`, `COL` or `BAND`; `TILE` for an array that is read at a query and a key,
        whose indices are the operands after it.
      dtype: what the tile program takes it as.
      lookup: how an array is read.
      index: whether it is an index of the array before it.
    """

    heads: str
    pair: str
    dtype: jnp.dtype
    lookup: Lookup | None = None
    index: bool = False

    def stays(self, heads: str) -> bool:
        """Whether it is the same along all other heads than `heads`."""
        return set(self.heads) <= set(heads)

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
      jaxpr: `(score?, q, k, float(q), float(k), *operands) -> outs`, elementwise, on scalars; what
        an array is read for is one operand.
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
        taken = sum(not operand.index for operand in self.operands)
        first = len(self.jaxpr.invars) - taken - 4
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
          (`rows + cols` long, from `-(len(cols) - 1)` on), each in its stored dtype; an array that
          is looked up as it is.
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
        f = lambda b, h, q, k: self.outside(b, h, q, k, *arrays)[n]
        if operand.lookup is not None:
            return f(*[jnp.zeros((), jnp.int32)] * 4)
        f = _as_scalar(f)
        if operand.pair != SCALAR:
            f = jax.vmap(f, in_axes=(None, None, *(0 if x.ndim else None for x in side)))
        index = []
        for dim, name in ((1, "h"), (0, "b")):
            f = jax.vmap(f, in_axes=tuple(0 if d == dim else None for d in range(4)))
            count = sizes[dim] if name in operand.heads else 1
            index.insert(0, origin[dim] + jnp.arange(count, dtype=jnp.int32))
        return f(*index, *side).astype(operand.stored)


def _as_scalar(f: Callable) -> Callable:
    """`f` whose result has no dimensions: it had them of size 1."""
    return lambda *args: f(*args).reshape(())


def derivatives(jaxpr: Jaxpr, wanted: Sequence[int]) -> Jaxpr:
    """Of a score mod: its value, its derivative by the score, and by some of what it loads.

    Args:
      jaxpr: `(score, b, h, q, k, *loaded) -> score`.
      wanted: which of `loaded`.

    Raises:
      NotImplementedError: for a derivative by more than one number.
    """
    if any(aval_of(jaxpr.invars[5 + n]).size != 1 for n in wanted):
        raise NotImplementedError("the gradient of an array that a pair reads several numbers of")
    moving = [0, *(5 + n for n in wanted)]

    def program(*args):
        def along(*values):
            own = dict(zip(moving, values, strict=True))
            (out,) = jaxpr_as_fun(jaxpr)(*(own.get(n, x) for n, x in enumerate(args)))
            return out

        out, pull_back = jax.vjp(along, *(args[n] for n in moving))
        return out, *(x.reshape(()) for x in pull_back(jnp.ones_like(out)))

    structs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(program)(*structs).jaxpr


def split(
    jaxpr: Jaxpr, *, score: bool, reads: Sequence[Read] | None = None, few: bool = False
) -> TileProgram:
    """Splits a mod.

    Args:
      jaxpr: `(b, h, q, k, *arrays) -> out` for a mask, `(score, b, h, q, k, *loaded) -> scores`.
      score: whether it is a score mod.
      reads: what each of `loaded` is.
      few: whether so few queries meet a key that what is cheap costs less than to load it.

    Raises:
      NotImplementedError: lists all that has no form inside a kernel.
    """
    flat = flatten(jaxpr)
    loaded = [class_of_read(read) for read in reads or ()]
    arrays = loaded if score else [Class()] * (len(flat.invars) - 4)
    given = [*[Class("", TILE)] * score, *INDICES, *arrays]
    flat = scalars(flat, classify(flat, given))
    classes = classify(flat, given)
    return _Splitter(flat, score, classes, tuple(reads or ()), few).result()


class _Splitter:
    """Decides for each equation on which side it runs, and builds the two programs."""

    def __init__(self, jaxpr: Jaxpr, score: bool, classes: dict[Var, Class], reads, few: bool):
        self.jaxpr, self.score, self.classes, self.reads = jaxpr, score, classes, reads
        self.kinds = (BAND, COL) if few else (BAND,)
        self.indices = jaxpr.invars[score : score + 4]
        self.lookups = self._lookups()
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

    def _lookups(self) -> dict[Var, tuple]:
        """Of each value that is looked up: how, in which variable or by which read, and where."""
        mixed = lambda v: self.classes[v].pair == TILE
        loaded = zip(self.reads, self.jaxpr.invars[5:], strict=True) if self.score else ()
        found = {v: (of_read(x, aval_of(v).dtype), x, ()) for x, v in loaded if mixed(v)}
        found |= {
            eqn.outvars[0]: of_eqn(eqn, self.classes, self._makers)
            for eqn in self.jaxpr.eqns
            if mixed(eqn.outvars[0])
        }
        return {v: entry for v, entry in found.items() if entry and entry[0]}

    def _is_inside(self, eqn: JaxprEqn) -> bool:
        """Whether an equation runs at every pair of a tile; so do conversions of an index."""
        if eqn.outvars[0] in self.lookups:
            return False
        pair = self.classes[eqn.outvars[0]].pair
        if pair in self.kinds and not self._expensive(eqn, pair):
            return True
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] in self.indices:
            return True
        return pair == TILE

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def _expensive(self, eqn: JaxprEqn, pair: str) -> bool:
        """Whether a function of the difference, or the key, holds more than cheap operations."""
        if eqn.primitive.name not in _CHEAP or any(aval_of(v).size != 1 for v in eqn.outvars):
            return True
        inner = {v for v in eqn.invars if isinstance(v, Var) and self.classes[v].pair == pair}
        inner.difference_update(self.indices)
        made = self._makers
        return any(v not in made or self._expensive(made[v], pair) for v in inner)

    def result(self) -> TileProgram:
        self._check()
        operands = tuple(x for v in self.frontier for x in self._operands(v))
        out = self.jaxpr.outvars[0]
        pair = self.classes[out].pair if isinstance(out, Var) else SCALAR
        return TileProgram(self._tile_jaxpr(), operands, self._outside(), pair)

    def _operands(self, v: Var) -> list[Operand]:
        """What the kernel takes for a value."""
        kind, dtype = self.classes[v], aval_of(v).dtype
        if v not in self.lookups:
            return [Operand(kind.heads, kind.pair, dtype)]
        lookup, int32 = self.lookups[v][0], jnp.dtype(jnp.int32)
        indices = [Operand(c.heads, c.pair, int32, index=True) for c in lookup.classes]
        return [Operand("", TILE, dtype, lookup), *indices]

    def _check(self) -> None:
        wrong = [
            f"`{eqn.primitive.name}` of a query and a key together (at {source_line(eqn)})"
            for eqn in self.inside
            if eqn.primitive.name not in OPS or any(aval_of(v).size != 1 for v in eqn.outvars)
        ]
        wrong += [
            f"a read of an array at an index that mixes query and key ({self.classes[v]})"
            for v in self.frontier
            if self.classes[v].pair == TILE and v not in self.lookups
        ]
        wrong += [
            f"a value of dtype {aval_of(v).dtype}"
            for v in self._order()
            if aval_of(v).dtype.itemsize > 4
            or jnp.issubdtype(aval_of(v).dtype, jnp.complexfloating)
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
                env[v] = x.reshape(aval_of(v).shape)
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

        struct = lambda v: jax.ShapeDtypeStruct((), aval_of(v).dtype)
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
        reads, score, lookups = self.reads, self.score, self.lookups
        eqns = [eqn for eqn in self.jaxpr.eqns if self.classes[eqn.outvars[0]].pair != TILE]
        needed = {v for v in self.frontier if v not in lookups}
        for _, source, starts in (lookups[v] for v in self.frontier if v in lookups):
            needed |= {v for v in (source, *starts) if isinstance(v, Var)}
        for eqn in reversed(eqns):
            if not needed.isdisjoint(eqn.outvars):
                needed |= {v for v in eqn.invars if isinstance(v, Var)}
        eqns = [eqn for eqn in eqns if not needed.isdisjoint(eqn.outvars)]

        def outside(b, h, q, k, *arrays):
            captures, context = arrays[: len(reads)], arrays[len(reads) :]
            if score:
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

            def source_starts(read: Read) -> list:
                return list(jaxpr_as_fun(read.index)(b, h, q, k, *context)[0])

            def operands(v) -> list:
                if v not in lookups:
                    return [env[v]]
                lookup, source, starts = lookups[v]
                if isinstance(source, Read):
                    array = captures[self.jaxpr.invars[5:].index(v)]
                    return [array, *lookup.indices(array, source_starts(source))]
                array = value(source)
                return [array, *lookup.indices(array, [value(x) for x in starts])]

            return [x for v in self.frontier for x in operands(v)]

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
    flat = flatten(read.index)
    classes = classify(flat, [*INDICES, *[Class()] * (len(flat.invars) - 4)])
    out = flat.outvars[0]
    return dataclasses.replace(classes[out], affine=False) if isinstance(out, Var) else Class()
