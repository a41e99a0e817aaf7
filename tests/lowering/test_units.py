"""Units of work: layouts that come back as they went, and schedules that change no result."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.lowering._tile_fn import COL, ROW
from xform.lowering._units import Units

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def plan(hidden=(), batch=2, heads=6, kv_heads=3, limit=16, apart=None, **by) -> Units:
    by = {"by_batch": False, "by_head": False} | by
    apart = apart or [False] * len(hidden)
    return Units.plan(hidden, batch, heads, kv_heads, apart=apart, limit=limit, **by)


PLANS = {
    "plain": plan(),
    "multi-query": plan(kv_heads=1),
    "one head": plan(batch=1, heads=1, kv_heads=1),
    "heads apart": plan(by_head=True),
    "hidden": plan((2, 3)),
    "hidden, heads apart": plan((3,), by_head=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_layouts_come_back_as_they_went(name):
    units = PLANS[name]
    d = len(units.sizes) - 2 - units.split
    hidden, (b, kv) = units.sizes[:d], units.sizes[d : d + 2]
    heads = kv * units.group * (units.sizes[-1] if units.split else 1)
    rows = normal(*hidden, b, 5, heads, 4)
    cols = normal(*hidden, b, 5, kv, 4)
    whole = normal(*hidden, 4, 2)

    by_row = units.rows(rows, 8)
    assert by_row.shape == (*units.sizes, units.group, 8, 4)
    assert np.array_equal(units.user_rows(by_row, 5), rows)
    assert not by_row[..., 5:, :].any()
    by_col = units.cols(cols, 8)
    assert by_col.shape == (*units.sizes[: d + 2], *(1,) * units.split, 8, 4)
    assert np.array_equal(units.user_cols(by_col, 5), cols)
    assert np.array_equal(units.user_whole(units.whole(whole)), whole)


@pytest.mark.parametrize("name", PLANS)
def test_every_unit_gets_the_rows_of_its_own_heads(name):
    """An array of head numbers, laid out as rows, is what `index` says, and columns are theirs."""
    units = PLANS[name]
    d = len(units.sizes) - 2 - units.split
    b, kv = units.sizes[d : d + 2]
    heads = kv * units.group * (units.sizes[-1] if units.split else 1)
    number = np.broadcast_to(np.arange(heads)[:, None], (*units.sizes[:d], b, 1, heads, 1))
    in_batch = np.broadcast_to(np.arange(b)[:, None, None, None], number.shape[d:])
    grid = (*units.sizes, units.group)
    at_b, at_h = units.index()
    rows = lambda x: units.rows(x, 1)[..., 0, 0]
    assert np.array_equal(rows(number), np.broadcast_to(at_h, grid))
    expected = np.broadcast_to(np.asarray(at_b)[..., None], grid)
    assert np.array_equal(rows(np.broadcast_to(in_batch, number.shape)), expected)
    of_col = units.cols(number[..., :kv, :], 1)[..., 0, 0]
    assert np.array_equal(
        np.broadcast_to(of_col[..., None], grid), np.broadcast_to(at_h // (heads // kv), grid)
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 16, 1000])
@pytest.mark.parametrize("by_head", [False, True])
def test_chunks_divide_their_dimension_and_keep_to_the_limit(limit, by_head):
    for batch, heads, kv_heads in [(1, 8, 1), (3, 8, 2), (4, 12, 12), (5, 7, 7), (6, 6, 2)]:
        units = plan((4,), batch, heads, kv_heads, limit=limit, by_head=by_head)
        assert all(size % n == 0 for size, n in zip(units.sizes, units.batch, strict=True))
        assert units.heads_at_once == units.group * math.prod(units.batch)
        assert units.heads_at_once <= max(limit, units.group)
        assert math.prod(units.sizes) * units.group == 4 * batch * heads


def test_what_has_a_block_map_of_its_own_runs_alone():
    assert plan((4,), apart=[True]).batch == (1, 2, 3)
    assert plan((4,), by_batch=True).batch[1] == 1
    assert plan((4,), by_head=True).batch[-2:] == (1, 1)
    assert plan((4,), by_head=True).group == 1


@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_a_schedule_changes_nothing_but_the_order(limit):
    """`run` stacks what is kept and sums the rest, as `vmap` and `sum` would."""
    units = plan((3,), 2, 4, 2, limit=limit)
    x, y = normal(3, 2, 2, 5), normal(3, 1, 1, 5)
    z = normal(1, 1, 2, 5)
    keep = [(True, True, True), (False, True, False), (False, False, False), (True, False, True)]

    def unit(x, y, z):
        return [x * y + z, jnp.sin(x) * y, x.sum() * z, y - z]

    found = jax.jit(lambda *xs: units.run(unit, xs, keep))(x, y, z)
    every = unit(x, np.broadcast_to(y, x.shape), z)
    every[2] = x.sum(-1, keepdims=True) * z
    for value, flags, all_units in zip(found, keep, every, strict=True):
        dropped = tuple(d for d, kept in enumerate(flags) if not kept)
        whole = np.broadcast_to(all_units, (3, 2, 2, 5))
        np.testing.assert_allclose(value, whole.sum(dropped, keepdims=True), rtol=2e-5, atol=1e-5)


def test_what_no_operand_moves_is_stacked_once_and_counted_as_often_as_it_is_summed():
    """A result that depends on unbatched operands alone: `y` below, along the first dimension."""
    units = plan((3,), 1, 1, 1)
    y = normal(1, 1, 1, 5)
    kept, summed = units.run(lambda x, y: [y, y], [np.ones((3, 1, 1, 1)), y],
                             [(True,) * 3, (False, True, True)])  # fmt: skip
    np.testing.assert_allclose(kept, np.broadcast_to(y, (3, 1, 1, 5)))
    np.testing.assert_allclose(summed, 3 * y, rtol=1e-6)


def test_a_result_is_kept_along_the_dimensions_that_its_kind_has():
    units = plan((3, 4), by_head=True)
    assert units.kept(ROW, (3, 1)) == (True, False, True, True, True)
    assert units.kept(COL, (1, 4)) == (False, True, True, True, False)
    assert units.kept((), (1, 1)) == (False,) * 5
    assert plan((3,)).kept(COL, (3,)) == (True, True, True)
