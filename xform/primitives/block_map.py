"""Which tiles a mask leaves: of each it is said whether it is empty, full or partial.

1. The mask runs once, in interval arithmetic, on all tiles at a time: an index is the range of its
   tile, a captured array its extremes over the range it is read at. What comes out are proofs: a
   tile is `EMPTY` if the mask is False at all of its pairs, `FULL` if True at all.
2. What is left is asked at its corners. If they differ, the tile is `PARTIAL`: so are nearly all
   tiles at the edge of a mask made of comparisons of indices and ids.
3. The rest, undecided, is evaluated pair by pair, a few tiles at a time. So a map is exact, and
   takes the memory of a few tiles.

A large map is made of blocks of tiles, which are proven first: only the partial ones are looked
into, so that a million tokens cost about as many steps as there are tiles at the mask's edge.
A value that depends on rows alone or on columns alone is computed once.

What is decided pair by pair of a mask that computes with floats is as XLA rounds it there.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int8

from xform._compat import Jaxpr, JaxprEqn, jaxpr_as_fun
from xform.jaxpr import eqn_rule, interpret
from xform.lowering._spec import EMPTY, FULL, PARTIAL
from xform.primitives._intervals import RULES, Interval, default, interval
from xform.primitives._reads import READS, hull

# Tiles of a map that is made at once; a larger one is made of blocks of `_SIDE` by `_SIDE` tiles,
# some of them together: a GPU pays for each step, not for tiles.
_AT_ONCE, _SIDE, _TOGETHER = 2**18, 64, 8
# Pairs that are evaluated at a time.
_PAIRS = 2**18
# The code of a tile that is undecided.
_MARK = np.int8(3)


class _Grid(NamedTuple):
    """A mask at one batch entry and head, and how its pairs are cut into tiles."""

    mask: Jaxpr | None
    captures: Sequence[Array | Interval]
    b: Array
    h: Array
    lengths: tuple[int, int]
    tile: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        (t, s), (q, k) = self.lengths, self.tile
        return -(-t // q), -(-s // k)

    @property
    def known(self) -> bool:
        """Whether the mask can be evaluated."""
        return not any(isinstance(x, Interval) for x in self.captures)


def block_map(
    mask: Jaxpr | None,
    captures: Sequence[Array | Interval],
    *,
    b: Array | int,
    h: Array | int,
    q_len: int,
    kv_len: int,
    q_tile: int,
    kv_tile: int,
    exact: bool = True,
) -> Int8[Array, "rows cols"]:
    """Says of each tile of one head whether a mask leaves nothing, something or all of it.

    Runs under jit and vmap (over `b`, `h` or captures), and inside `shard_map` where the captures
    have no varying axes, or `check_vma` is off. A tile that sticks out beyond the lengths is at
    most `PARTIAL`; what the mask says out there has no influence.

    Args:
      mask: a jaxpr without constants, `(b, h, q_idx, kv_idx, *captures) -> bool`, all but the
        captures int32 scalars; None hides nothing.
      captures: the arrays that the mask reads; an interval for one whose content is not known, with
        which a tile is `PARTIAL` if it may be.
      b, h: the batch and head, scalars.
      q_len, kv_len: how many queries and keys there are; may be 0.
      q_tile, kv_tile: how many of each make a tile.
      exact: whether to decide what is not proven; else that is `PARTIAL`.

    Returns:
      `EMPTY`, `PARTIAL` or `FULL` of each of the `ceil(q_len / q_tile)` by
      `ceil(kv_len / kv_tile)` tiles.

    >>> i = jnp.int32(0)
    >>> causal = jax.make_jaxpr(lambda b, h, q, k: q >= k)(i, i, i, i)
    >>> block_map(causal, (), b=0, h=0, q_len=6, kv_len=6, q_tile=2, kv_tile=2).tolist()
    [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    """
    grid = _Grid(mask, captures, jnp.int32(b), jnp.int32(h), (q_len, kv_len), (q_tile, kv_tile))
    if 0 in grid.sizes:
        return jnp.zeros(grid.sizes, jnp.int8)
    if mask is None or not exact:
        return _analysis(grid)(_all)
    return _looked_into(grid, _decided)


def undecided(
    mask: Jaxpr, captures: Sequence[Array], *, b: Array | int, h: Array | int,
    q_len: int, kv_len: int, q_tile: int, kv_tile: int,
) -> Bool[Array, "rows cols"]:  # fmt: skip
    """Says of each tile whether nothing but all of its pairs decides what it is.

    Arguments as of `block_map`.

    >>> i = jnp.int32(0)
    >>> some = jax.make_jaxpr(lambda b, h, q, k: (q - k) % 3 == 1)(i, i, i, i)
    >>> sizes = {"q_len": 9, "kv_len": 9, "q_tile": 4, "kv_tile": 4}
    >>> undecided(some, (), b=0, h=0, **sizes).tolist()[0]
    [True, True, False]
    """
    grid = _Grid(mask, captures, jnp.int32(b), jnp.int32(h), (q_len, kv_len), (q_tile, kv_tile))

    def mark(grid, each, codes, first):
        return jnp.where(each(partial(_open, grid), jax.vmap)(codes, first)[0], _MARK, codes)

    return _looked_into(grid, mark) == _MARK


def density(kinds: Int8[Array, "*dims rows cols"]) -> Float[Array, "*dims"]:
    """Returns the share of tiles that aren't empty, of each map: what attention computes of all.

    >>> float(density(jnp.array([[PARTIAL, EMPTY], [FULL, PARTIAL]], jnp.int8)))
    0.75
    """
    return jnp.mean(kinds != EMPTY, axis=(-2, -1))


# ---- Proofs --------------------------------------------------------------------------------------


def _analysis(grid: _Grid, padded: tuple[int, ...] | None = None) -> Callable:
    """Runs the mask on intervals as far as rows and columns are apart.

    Returns:
      `codes(cut)`: what is proven where `cut` makes something of the intervals `[rows, cols, ...]`,
      some of the tiles or one of several; with `padded`, of so many rows and columns, those
      beyond the lengths without meaning.
    """
    sizes = grid.sizes if padded is None else padded
    (q, q_whole), (k, k_whole) = (_indices(grid, side, sizes[side]) for side in (0, 1))
    staged = _Staged()
    if grid.mask is None:
        out = interval(True)
    else:
        rules = {key: eqn_rule(staged.apply(rule)) for key, rule in (RULES | READS).items()}
        run = interpret(grid.mask, rules, default=staged.apply(None))
        (out,) = run(grid.b, grid.h, q, k, *grid.captures)

    def codes(cut: Callable):
        seen = interval(staged.value(out, cut))
        whole = cut(Interval(q_whole, q_whole)).lo & cut(Interval(k_whole, k_whole)).lo
        code = jnp.where(seen.lo & whole, FULL, jnp.where(seen.hi, PARTIAL, EMPTY))
        return jnp.broadcast_to(code, whole.shape).astype(jnp.int8)

    return codes


def _all(x: Interval) -> Interval:
    return x


def _indices(grid: _Grid, side: int, tiles: int) -> tuple[Interval, Array]:
    """The indices in each tile, as far as they exist, and whether all of a tile's do."""
    length, tile = grid.lengths[side], grid.tile[side]
    start = jnp.arange(tiles, dtype=jnp.int32).reshape((-1, 1) if side == 0 else (1, -1)) * tile
    ends = Interval(*(jnp.minimum(end, length - 1) for end in (start, start + tile - 1)))
    return ends, start + tile <= length


class _Later:
    """A value that mixes rows and columns of tiles."""


class _Staged:
    """Runs rules at once where that is cheap, and writes down the rest to run on some rows.

    Equations on arrays run as they are, those on intervals by their rule. If one operand changes
    with the rows and another with the columns, the result is `_Later`, and so is all that follows.
    """

    def __init__(self):
        self.tape: list[tuple[Callable, tuple, list[_Later]]] = []

    def apply(self, rule: Callable | None) -> Callable:
        """`rule(*args, **params)` as `rule(eqn, *args)`; None stands for one that knows nothing."""

        def run(eqn: JaxprEqn, *args):
            if not any(isinstance(x, Interval | _Later) for x in args):
                return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
            if rule is None:
                return default(eqn, *args)
            if not _mixed(args):
                return rule(*args, **eqn.params)
            results = [_Later() for _ in eqn.outvars]
            self.tape.append((partial(rule, **eqn.params), args, results))
            return results if eqn.primitive.multiple_results else results[0]

        return run

    def value(self, x, cut: Callable):
        """What `x` is where `cut` makes something of what was run at once."""
        known: dict[_Later, Interval] = {}

        def at(x):
            if isinstance(x, _Later):
                return known[x]
            return cut(x) if isinstance(x, Interval) else x

        for rule, args, results in self.tape:
            out = rule(*map(at, args))
            known.update(zip(results, out if isinstance(out, list) else [out], strict=True))
        return at(x)


def _mixed(args: Sequence) -> bool:
    tiles = [x.tiles for x in args if isinstance(x, Interval)]
    by_row, by_col = any(rows > 1 for rows, _ in tiles), any(cols > 1 for _, cols in tiles)
    return any(isinstance(x, _Later) for x in args) or (by_row and by_col)


# ---- Decisions -----------------------------------------------------------------------------------


def _looked_into(grid: _Grid, look: Callable) -> Array:
    """What `look(grid, each, codes, first)` makes of all that is proven.

    `codes` are those of a block of tiles from row and column `first` on, or of several; and
    `each(f, over)` is `f` of one, or `over(f)` of several.
    """
    if math.prod(grid.sizes) <= _AT_ONCE:
        return look(grid, lambda f, over: f, _analysis(grid)(_all), (0, 0))
    # Under vmap one after the other: a batched loop would copy all maps in each of its steps.
    run = jax.custom_batching.sequential_vmap(
        lambda b, h, *captures: _by_blocks(grid._replace(b=b, h=h, captures=captures), look)
    )
    return run(grid.b, grid.h, *grid.captures)


def _decided(grid: _Grid, each: Callable, codes: Array, first: tuple) -> Array:
    """The codes `[...,R,C]`, all of them decided."""
    if not grid.known:
        return codes
    undecided, *starts = each(partial(_open, grid), jax.vmap)(codes, first)
    settle = lambda codes: each(partial(_settled, grid), _in_turn)(*starts, undecided, codes)
    return lax.cond(jnp.any(undecided), settle, lambda codes: codes, codes)


def _in_turn(f: Callable) -> Callable:
    """`f` of each of several: together, all would take as many turns as the longest."""
    return lambda *blocks: lax.map(lambda block: f(*block), blocks)


def _open(grid: _Grid, codes: Array, first: tuple) -> tuple[Array, Array, Array]:
    """Which tiles are decided neither by proof nor at their corners, and where they start."""
    sides = zip(first, codes.shape, grid.tile, strict=True)
    q, k = ((i + jnp.arange(n, dtype=jnp.int32)) * tile for i, n, tile in sides)
    ends = [
        jnp.concatenate([start, start + tile - 1])
        for start, tile in zip((q, k), grid.tile, strict=True)
    ]
    (rows, cols), seen = codes.shape, _seen(grid, *ends)
    corners = [seen[i : i + rows, j : j + cols] for i in (0, rows) for j in (0, cols)]
    some, every = reduce(operator.or_, corners), reduce(operator.and_, corners)
    inside = zip((q, k), grid.tile, grid.lengths, strict=True)
    q_whole, k_whole = (start + tile <= length for start, tile, length in inside)
    # A tile that sticks out is never full: there, one pair that is seen decides.
    can_be_full = every & q_whole[:, None] & k_whole[None]
    return (codes == PARTIAL) & (can_be_full | ~some), q, k


def _settled(grid: _Grid, q: Array, k: Array, undecided: Array, codes: Array) -> Array:
    """The same codes, those that are undecided found pair by pair, some tiles at a time.

    Args:
      grid: the mask.
      q, k: the first query of each row, the first key of each column.
      undecided, codes: of each tile.
    """
    count = max(1, min(codes.size, _PAIRS // math.prod(grid.tile)))
    places = jnp.nonzero(undecided, size=codes.size + -codes.size % count, fill_value=codes.shape)
    (t, s), (q_tile, kv_tile) = grid.lengths, grid.tile

    def code(i, j):
        seen = _seen(grid, q[i] + jnp.arange(q_tile), k[j] + jnp.arange(kv_tile))
        full = jnp.all(seen) & (q[i] + q_tile <= t) & (k[j] + kv_tile <= s)
        return jnp.where(full, FULL, jnp.where(jnp.any(seen), PARTIAL, EMPTY)).astype(jnp.int8)

    def step(n, codes):
        at = tuple(lax.dynamic_slice_in_dim(x, n * count, count) for x in places)
        return codes.at[at].set(jax.vmap(code)(*at), mode="drop")

    number = jnp.sum(undecided, dtype=jnp.int32)
    return lax.fori_loop(0, (number + count - 1) // count, step, codes)


def _seen(grid: _Grid, q: Array, k: Array) -> Array:
    """The mask at queries `[n]` and keys `[m]`, those beyond the lengths taken as the last."""
    assert grid.mask is not None
    program = jaxpr_as_fun(grid.mask)
    point = lambda q, k: program(grid.b, grid.h, q, k, *grid.captures)[0]
    last_q, last_k = (n - 1 for n in grid.lengths)
    at = jnp.minimum(q, last_q).astype(jnp.int32), jnp.minimum(k, last_k).astype(jnp.int32)
    return jax.vmap(jax.vmap(point, (None, 0)), (0, None))(*at)


def _by_blocks(grid: _Grid, look: Callable) -> Array:
    """A large map: proofs for blocks of tiles, then a look into those that are partial."""
    proven = _analysis(grid, tuple(n + -n % _SIDE for n in grid.sizes))
    rough = proven(_hulls)
    count = jnp.sum(rough == PARTIAL, dtype=jnp.int32)
    size = rough.size + -rough.size % _TOGETHER
    places = jnp.nonzero(rough == PARTIAL, size=size, fill_value=max(rough.shape))

    def codes(*first):
        return proven(partial(jax.tree.map, partial(_block, first=first)))

    def step(n, kinds):
        at = [lax.dynamic_slice_in_dim(x, n * _TOGETHER, _TOGETHER) for x in places]
        first = tuple(x.astype(jnp.int32) * _SIDE for x in at)
        blocks = look(grid, lambda f, over: over(f), jax.vmap(codes)(*first), first)
        return kinds.at[at[0], :, at[1], :].set(blocks, mode="drop")

    rows, cols = rough.shape
    kinds = jnp.broadcast_to(rough[:, None, :, None], (rows, _SIDE, cols, _SIDE))
    kinds = lax.fori_loop(0, (count + _TOGETHER - 1) // _TOGETHER, step, kinds)
    return kinds.reshape(rows * _SIDE, cols * _SIDE)[: grid.sizes[0], : grid.sizes[1]]


def _block(x: Array, first: tuple) -> Array:
    """The block of an array `[rows, cols, ...]` from row and column `first` on."""
    for dim, start in enumerate(first):
        x = x if x.shape[dim] == 1 else lax.dynamic_slice_in_dim(x, start, _SIDE, dim)
    return x


def _hulls(x: Interval) -> Interval:
    """The union over each block."""
    for dim in (0, 1):
        if x.lo.shape[dim] > 1:
            split = lambda a, d=dim: a.reshape(*a.shape[:d], -1, _SIDE, *a.shape[d + 1 :])
            x = hull(jax.tree.map(split, x), dim + 1)
    return x
