"""The blockwise lowering: which tiles it visits, and how little memory it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.lowering._spec import At, Spec
from xform.lowering._tile_fn import COL, ROW
from xform.lowering.blockwise import FULL, PARTIAL, Grid, Side
from xform.primitives._mods import take_apart
from xform.primitives.attention import flex_attention
from xform.primitives.block_map import block_map
from xform.primitives.masks import causal, sliding_window


@pytest.mark.parametrize("heads", [1, 4, 16, 64])
def test_a_side_is_cut_without_an_empty_tile_and_with_little_padding(heads):
    for length in [*range(1, 1200), 4096, 32_768, 99_999]:
        side = Side.cut_evenly(length, heads, 0)
        assert (side.count - 1) * side.tile < length <= side.padded
        assert side.padded - length < 8 * side.count
        assert side.tile <= 768


# ---- Work ----------------------------------------------------------------------------------------

TILE, COUNT = 8, 6


def visits(mask, along, length=TILE * COUNT):
    """How often `Grid.fold` visits each tile, unmasked and masked: `[rows, cols, 2]`."""
    mods = take_apart(None, mask, jnp.float32)
    spec = Spec(1.0, jnp.dtype("float32"), None, (), mods.mask, mods.mask_dims)
    row, col = Side(length, TILE, 1), Side(length, TILE, 0)
    b, h, none = jnp.int32(0), jnp.arange(1), jnp.arange(0)

    @jax.jit
    def run(context):
        grid = Grid.of(row, col, spec, At(b, h, none, none, tuple(context)), block_map)

        def line(n):
            step = lambda masked, m, seen: seen.at[m, int(masked)].add(1)
            return grid.fold(along, n, step, jnp.zeros((COUNT, 2), int))

        return jax.lax.map(line, jnp.arange(COUNT)), grid.kinds

    seen, kinds = map(np.asarray, run(mods.context))
    return (seen if along == ROW else seen.swapaxes(0, 1)), kinds


@pytest.mark.parametrize("along", [ROW, COL])
@pytest.mark.parametrize("length", [TILE * COUNT, TILE * COUNT - 3])
def test_causal_visits_the_lower_triangle_and_masks_the_diagonal(along, length):
    seen, kinds = visits(causal(), along, length)
    assert seen.sum() == COUNT * (COUNT + 1) // 2
    assert np.array_equal(seen[..., 0], kinds == FULL)
    assert np.array_equal(seen[..., 1], kinds == PARTIAL)
    assert seen[..., 1].sum() == (COUNT if length % TILE == 0 else 2 * COUNT - 1)


def test_a_window_visits_its_band():
    seen, _ = visits(sliding_window(jnp.int32(TILE)), ROW)
    assert np.array_equal(seen[..., 1], np.eye(COUNT) + np.eye(COUNT, k=-1))
    assert not seen[..., 0].any()


def test_nothing_is_visited_where_nothing_is_seen():
    seen, _ = visits(lambda b, h, q, k: k > q + 1000, ROW)
    assert not seen.any()


def test_without_a_mask_all_tiles_are_full_and_those_that_stick_out_are_partial():
    seen, _ = visits(None, ROW, TILE * COUNT - 1)
    assert np.array_equal(seen.sum(-1), np.ones((COUNT, COUNT)))
    assert seen[..., 1].sum() == 2 * COUNT - 1


# ---- Size of the program -----------------------------------------------------------------------


def operations(length) -> int:
    """Operations of a forward and backward pass, as they go to the compiler."""
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).as_text()
    return text.count("\n")


def test_programs_of_all_lengths_are_of_one_size():
    """One tile, or loops over tiles: nothing is unrolled, so that no length compiles slowly."""
    short = [operations(length) for length in (1, 355)]
    long = [operations(length) for length in (801, 2049, 4095)]
    assert max(short) < 1.05 * min(short)
    assert max(long) < 1.05 * min(long) < 2500


# ---- Memory --------------------------------------------------------------------------------------


def temporaries(f, length, heads=1) -> int:
    """Bytes that the compiled program allocates besides its arguments and results."""
    x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    return jax.jit(f).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def loss(q, k, v, slope=0.1):
    score = lambda s, b, h, q_idx, kv_idx: s - slope * (q_idx - kv_idx)
    return jnp.sin(flex_attention(q, k, v, score_mod=score, mask_mod=causal())).sum()


def gradients(q, k, v):
    return jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, jnp.float32(0.1))


@pytest.mark.parametrize("f", [loss, gradients])
def test_memory_at_32k_is_under_three_percent_of_the_scores(f):
    assert temporaries(f, 2**15) < 0.03 * 4 * 2**30


def hessian_vector(q, k, v):
    return jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, v), (v, q, k))


def test_memory_of_a_hessian_vector_product_stays_linear_in_the_length():
    rows = 4 * 64 * 2**13  # bytes of one array like q
    assert temporaries(hessian_vector, 2**13) < 16 * rows < 0.13 * 4 * 2**26


@pytest.mark.slow
def test_a_large_table_gets_one_gradient_whatever_the_number_of_heads():
    def f(q, k, v):
        def loss(table):
            score = lambda s, b, h, q_idx, kv_idx: s + table[q_idx, kv_idx]
            return jnp.sin(flex_attention(q, k, v, score_mod=score)).sum()

        return jax.grad(loss)(q[0, :, 0] @ k[0, :, 0].T)

    few, many = (temporaries(f, 512, heads) for heads in (2, 8))
    table, operand = 4 * 512 * 512, 4 * 512 * 64
    assert many - few < table + 6 * 6 * operand
