"""How mods are split into what a kernel reads and what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from xform.lowering.mosaic_gpu._program import BAND, COL, ROW, SCALAR, TILE, split
from xform.primitives._mods import take_apart

HEADS, LENGTH = 4, 40
SLOPES = 2.0 ** -jnp.arange(HEADS)
TABLE = jax.random.normal(jax.random.key(0), (HEADS, 2 * LENGTH))
IDS = jnp.arange(LENGTH) // 7
PAIRS = jax.random.normal(jax.random.key(1), (HEADS, LENGTH, LENGTH))
GRAPH = jax.random.bernoulli(jax.random.key(2), 0.3, (LENGTH, LENGTH))
BITS = jax.random.bits(jax.random.key(3), (LENGTH, 2), jnp.uint32)

SCORES = {
    "slope by distance": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), [("h", SCALAR)]),
    "soft cap": (lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), []),
    "table by distance": (lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH], [("h", BAND)]),
    "bucket of distance": (
        lambda s, b, h, q, k: s + TABLE[0, jnp.log2(jnp.abs(q - k) + 1.0).astype(int)],
        [("", BAND)],
    ),
    "row and column": (
        lambda s, b, h, q, k: s * TABLE[h, q] + TABLE[0, k],
        [("h", ROW), ("", COL)],
    ),
    "pair bias": (
        lambda s, b, h, q, k: s + PAIRS[h, q, k],
        [("", TILE), ("h", SCALAR), ("", ROW), ("", COL)],
    ),
    "two labels": (
        lambda s, b, h, q, k: s * TABLE[IDS[q] % 3 + h % 2, IDS[k]],
        [("", TILE), ("h", ROW), ("", COL)],
    ),
    "filled": (
        lambda s, b, h, q, k: s + PAIRS.at[0, q - 3, k + h].get(mode="fill", fill_value=7),
        [("", TILE), ("", SCALAR), ("", ROW), ("h", COL)],
    ),
    "clipped": (
        lambda s, b, h, q, k: s + PAIRS[0, q + 5, k - 50],
        [("", TILE), ("", SCALAR), ("", ROW), ("", COL)],
    ),
    "select": (
        lambda s, b, h, q, k: jnp.select([s > 1, s > 0, q > k], [s, 2 * s, -s], 0.0),
        [],
    ),
    "largest of three": (lambda s, b, h, q, k: jnp.max(jnp.array([s, -s, s * s - 1])), []),
    "one of three": (
        lambda s, b, h, q, k: jnp.array([s, -s, s * s])[(q - k) % 3],
        [("", BAND)] * 2,
    ),
    "which is largest": (
        lambda s, b, h, q, k: s + jnp.argmax(jnp.array([s, -s, s * s])),
        [],
    ),
    "polynomial": (
        lambda s, b, h, q, k: jnp.polyval(jnp.array([0.1, -1.0, 2.0]), s),
        [("", SCALAR)] * 3,
    ),
    "vectors": (
        lambda s, b, h, q, k: s + jnp.dot(PAIRS[0, q, :3], PAIRS[1, k, :3]),
        [("", ROW)] * 3 + [("", COL)] * 3,
    ),
    "steps": (lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, s), []),
    "branch": (lambda s, b, h, q, k: jax.lax.cond(q > k, lambda: s, lambda: -s), []),
}
MASKS = {
    "documents": (lambda b, h, q, k: IDS[q] == IDS[k], [("", ROW), ("", COL)]),
    "blocks by division": (lambda b, h, q, k: q // 32 == k // 32, [("", ROW), ("", COL)]),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 9), []),
    "padding": (lambda b, h, q, k: k < 3 + b, [("b", COL)]),
    "stride": (lambda b, h, q, k: (q - k) % 7 == 0, [("", BAND)]),
    "by head": (lambda b, h, q, k: q >= k + h, [("h", COL)]),
    "graph": (lambda b, h, q, k: GRAPH[q, k], [("", TILE), ("", ROW), ("", COL)]),
    "packed": (
        lambda b, h, q, k: (BITS[q, k // 32] >> (k % 32)) & 1 == 1,
        [("", TILE), ("", ROW), ("", COL), ("", COL)],
    ),
    "filled graph": (
        lambda b, h, q, k: GRAPH.at[q, k + 3].get(mode="fill", fill_value=True),
        [("", TILE), ("", ROW), ("", COL)],
    ),
    "taken": (
        lambda b, h, q, k: jnp.take(GRAPH[:, 3], q) | GRAPH[k, q],
        [("", ROW), ("", TILE), ("", COL), ("", ROW)],
    ),
}  # fmt: skip


def parts(mod, score: bool):
    mods = take_apart(mod if score else None, None if score else mod, jnp.float32)
    reads = [read for group in mods.reads for read in group]
    captures = [x for x, group in zip(mods.captures, mods.reads, strict=True) for _ in group]
    jaxpr = mods.score if score else mods.mask
    assert jaxpr is not None
    return split(jaxpr, score=score, reads=reads if score else None), [*captures, *mods.context]


def dense(program, arrays, *score):
    """The mod at all pairs of batch entry 1 and every head, out of its two parts."""
    index = jnp.arange(LENGTH, dtype=jnp.int32)
    operands = program.arrays(arrays, 2, HEADS, (0, 0), index, index)

    def at(h, q, k, *score):
        values, left = [], list(zip(operands, program.operands, strict=True))

        def take():
            x, operand = left.pop(0)
            if operand.lookup is not None:
                at = [take() for _ in operand.lookup.dims]
                outside = jnp.array([i < 0 for i in at]).any()
                x = x[tuple(jnp.maximum(i, 0) for i in at)]
                return jnp.where(outside, operand.lookup.fill or 0, x).astype(operand.dtype)
            x = x[1 if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
            place = {ROW: q, COL: k, BAND: q - k + LENGTH - 1}.get(operand.pair)
            return (x if place is None else x[place]).astype(operand.dtype)

        while left:
            values.append(take())
        indices = (q, k, q.astype(jnp.float32), k.astype(jnp.float32))
        return jaxpr_as_fun(program.jaxpr)(*score, *indices, *values)[0]

    over = lambda f, n: jax.vmap(jax.vmap(f, (None, 0, *[0] * n)), (0, None, *[0] * n))
    return jax.vmap(lambda h, *s: over(lambda q, k, *s: at(h, q, k, *s), len(s))(index, index, *s))(
        jnp.arange(HEADS), *score
    )


@pytest.mark.parametrize("name", SCORES)
def test_scores_split_and_joined_are_the_same(name):
    mod, operands = SCORES[name]
    program, arrays = parts(mod, score=True)
    assert [(x.heads, x.pair) for x in program.operands] == operands
    score = jax.random.normal(jax.random.key(1), (HEADS, LENGTH, LENGTH))
    h, q, k = jnp.ogrid[:HEADS, :LENGTH, :LENGTH]
    expected = jax.vmap(mod, (0, *[None] * 3, 0))
    expected = jax.vmap(expected, (0, None, None, 0, None))
    expected = jax.vmap(expected, (0, None, 0, None, None))
    expected = expected(score, 1, h.ravel(), q.ravel(), k.ravel())
    np.testing.assert_allclose(dense(program, arrays, score), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_masks_split_and_joined_are_the_same(name):
    mod, operands = MASKS[name]
    program, arrays = parts(mod, score=False)
    assert [(x.heads, x.pair) for x in program.operands] == operands
    h, q, k = jnp.ogrid[:HEADS, :LENGTH, :LENGTH]
    each = lambda h, q, k: mod(jnp.int32(1), h, q, k)
    expected = jax.vmap(jax.vmap(jax.vmap(each, (None, None, 0)), (None, 0, None)), (0, None, None))
    expected = expected(h.ravel(), q.ravel(), k.ravel())
    np.testing.assert_array_equal(dense(program, arrays), expected)


def test_no_gather_and_no_division_inside():
    for mod, _ in [*MASKS.values(), *SCORES.values()]:
        program, _ = parts(mod, score=mod in [m for m, _ in SCORES.values()])
        names = {eqn.primitive.name for eqn in program.jaxpr.eqns}
        assert not names & {"gather", "dynamic_slice", "rem"}


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (
            lambda s, b, h, q, k: s + TABLE[0, q * k],
            "a read of an array at an index that mixes",
        ),
        (lambda s, b, h, q, k: s + jnp.sort(jnp.stack([s, s]))[0], "`sort`"),
    ],
)
def test_says_what_has_no_form_in_a_kernel(mod, message):
    with pytest.raises(NotImplementedError, match=message):
        parts(mod, score=True)
