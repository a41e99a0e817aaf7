"""Which tiles a mask leaves: of each it is said whether it is empty, full or partial.

The mask runs once, in interval arithmetic, on all tiles at a time: an index is the range of its
tile, a captured array its extremes over the range it is read at. What comes out are proofs: a tile
is `EMPTY` if the mask is False at all of its pairs, `FULL` if True at all, else `PARTIAL`, which is
always safe, and exact for masks made of comparisons of indices and ids.

A value that depends on rows alone or on columns alone is computed once. What mixes the two is
computed for some rows of tiles at a time, so that only the map has as many elements as tiles.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int8

from xform._compat import Jaxpr, JaxprEqn
from xform.jaxpr import eqn_rule, interpret
from xform.lowering._spec import EMPTY, FULL, PARTIAL
from xform.primitives._intervals import RULES, Interval, default, interval
from xform.primitives._reads import READS

# Tiles at a time, and the rows of tiles that there are at least among them.
_TILES, _ROWS = 2**18, 64


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
) -> Int8[Array, "rows cols"]:
    """Says of each tile of one head whether a mask leaves nothing, something or all of it.

    Runs under jit and vmap (over `b`, `h` or captures), and inside `shard_map` where the captures
    have no varying axes, or `check_vma` is off. A tile that sticks out beyond the lengths is at
    most `PARTIAL`; what the mask says out there has no influence.

    Args:
      mask: a jaxpr without constants, `(b, h, q_idx, kv_idx, *captures) -> bool`, all but the
        captures int32 scalars; None hides nothing.
      captures: the arrays that the mask reads; an interval for one whose content is not known.
      b, h: the batch and head, scalars.
      q_len, kv_len: how many queries and keys there are; may be 0.
      q_tile, kv_tile: how many of each make a tile.

    Returns:
      `EMPTY`, `PARTIAL` or `FULL` of each of the `ceil(q_len / q_tile)` by
      `ceil(kv_len / kv_tile)` tiles.

    >>> i = jnp.int32(0)
    >>> causal = jax.make_jaxpr(lambda b, h, q, k: q >= k)(i, i, i, i)
    >>> block_map(causal, (), b=0, h=0, q_len=6, kv_len=6, q_tile=2, kv_tile=2).tolist()
    [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    """
    rows, cols = -(-q_len // q_tile), -(-kv_len // kv_tile)
    if rows == 0 or cols == 0:
        return jnp.zeros((rows, cols), jnp.int8)
    chunk = min(rows, max(_ROWS, _TILES // cols))
    chunks = -(-rows // chunk)
    q, q_whole = _indices(chunks * chunk, q_tile, q_len, (-1, 1))
    k, k_whole = _indices(cols, kv_tile, kv_len, (1, -1))
    staged = _Staged()
    if mask is None:
        out = interval(True)
    else:
        rules = {key: eqn_rule(staged.apply(rule)) for key, rule in (RULES | READS).items()}
        run = interpret(mask, rules, default=staged.apply(None))
        (out,) = run(jnp.int32(b), jnp.int32(h), q, k, *captures)

    def some_rows(i):
        cut = lambda x: x if x.shape[0] == 1 else lax.dynamic_slice_in_dim(x, i * chunk, chunk)
        seen = interval(staged.value(out, cut))
        full = seen.lo & cut(q_whole) & k_whole
        code = jnp.where(full, FULL, jnp.where(seen.hi, PARTIAL, EMPTY))
        return jnp.broadcast_to(code, (chunk, cols)).astype(jnp.int8)

    if chunks == 1:
        return some_rows(0)
    return lax.map(some_rows, jnp.arange(chunks)).reshape(-1, cols)[:rows]


def density(kinds: Int8[Array, "*dims rows cols"]) -> Float[Array, "*dims"]:
    """Returns the share of tiles that aren't empty, of each map: what attention computes of all.

    >>> float(density(jnp.array([[PARTIAL, EMPTY], [FULL, PARTIAL]], jnp.int8)))
    0.75
    """
    return jnp.mean(kinds != EMPTY, axis=(-2, -1))


def _indices(tiles: int, tile: int, length: int, shape: tuple) -> tuple[Interval, Array]:
    """The indices in each tile, as far as they exist, and whether all of a tile's do."""
    start = jnp.arange(tiles, dtype=jnp.int32).reshape(shape) * tile
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
        """What `x` is on the rows that `cut` leaves of an array."""
        known: dict[_Later, Interval] = {}

        def at(x):
            if isinstance(x, _Later):
                return known[x]
            return jax.tree.map(cut, x) if isinstance(x, Interval) else x

        for rule, args, results in self.tape:
            out = rule(*map(at, args))
            known.update(zip(results, out if isinstance(out, list) else [out], strict=True))
        return at(x)


def _mixed(args: Sequence) -> bool:
    tiles = [x.tiles for x in args if isinstance(x, Interval)]
    by_row, by_col = any(rows > 1 for rows, _ in tiles), any(cols > 1 for _, cols in tiles)
    return any(isinstance(x, _Later) for x in args) or (by_row and by_col)
