"""The one product of attention: what is hidden stays hidden, and the derivatives are each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from xform.lowering import _contract

contract = jax.jit(_contract.contract, static_argnames=("out", "dtype"))

G, Q, K, D = 2, 5, 7, 3
SHAPES = {"tile": (G, Q, K), "row": (G, Q, D), "col": (K, D)}
INDICES = {"tile": "gqk", "row": "gqd", "col": "kd"}
OPERANDS = {"tile": ("row", "col"), "row": ("tile", "col"), "col": ("tile", "row")}
OUTS = tuple(OPERANDS)
BAD = (np.nan, np.inf, -np.inf)


def inputs(out, heads=1, dtype="float32", seed=0):
    """Random operands and a mask of which query 1 and key 2 see and are seen by nothing."""
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=SHAPES[role]).astype(dtype) for role in OPERANDS[out])
    visible = rng.random((heads, Q, K)) < 0.6
    visible[:, 1] = visible[:, :, 2] = False
    # A tile is a function of scores, which are minus infinity where hidden: it is 0 there.
    return (x if out == "tile" else np.where(visible, x, 0).astype(dtype)), y, visible


def by_hand(x, y, visible, out):
    """The sum over visible pairs, in float64."""
    of = dict(zip(OPERANDS[out], (x, y), strict=True))
    if out != "tile":
        of["tile"] = np.where(visible, of["tile"], 0)
    equation = ",".join(INDICES[role] for role in of) + "->" + INDICES[out]
    total = np.einsum(equation, *(z.astype(np.float64) for z in of.values()))
    return np.where(visible, total, 0) if out == "tile" else total


@pytest.mark.parametrize("heads", [1, G])
@pytest.mark.parametrize("out", OUTS)
def test_the_sum_is_over_visible_pairs(out, heads):
    x, y, visible = inputs(out, heads)
    found = contract(x, y, out=out, dtype="float32", visible=visible, finite=True)
    np.testing.assert_allclose(found, by_hand(x, y, visible, out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("out", OUTS)
def test_a_hidden_row_or_column_that_is_not_finite_changes_no_bit(out, bad):
    x, y, visible = inputs(out)
    spoilt = {"tile": x.copy(), "row": x.copy(), "col": x.copy()}[out], y.copy()
    for role, z in zip(OPERANDS[out], spoilt, strict=True):
        if role == "row":
            z[:, 1, 0] = bad
        if role == "col":
            z[2, 1] = bad
        if role == "tile" and out == "col":  # a whole row of weights, as of a query that is NaN
            z[:, 1] = bad
    clean = contract(x, y, out=out, dtype="float32", visible=visible, finite=True)
    found = contract(*spoilt, out=out, dtype="float32", visible=visible, finite=False)
    assert np.array_equal(found, clean)


def entries(out):
    """Positions of the second operand at which it is spoilt, and by what."""
    size = np.prod(SHAPES[OPERANDS[out][1]])
    return st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from(BAD)), max_size=4)


@pytest.mark.parametrize("out", ["row", "col"])
@given(data=st.data())
def test_a_sum_that_sees_what_is_not_finite_is_nan_and_no_other(out, data):
    x, y, visible = inputs(out, seed=1)
    x[np.abs(x) < 0.3] = 0  # a weight of 0 sees as well
    for i, bad in data.draw(entries(out)):
        y.flat[i] = bad
    found = contract(x, y, out=out, dtype="float32", visible=visible, finite=False)
    equation = "gqk,kd->gqd" if out == "row" else "gqk,gqd->kd"
    sees = np.einsum(equation, np.broadcast_to(visible, (G, Q, K)) * 1, ~np.isfinite(y) * 1) > 0
    assert np.array_equal(np.isnan(found), sees)
    finite = by_hand(x, np.where(np.isfinite(y), y, 0), visible, out)
    np.testing.assert_allclose(found[~sees], finite[~sees], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "out", [pytest.param(out, marks=() if out == "row" else pytest.mark.slow) for out in OUTS]
)
def test_derivatives_of_both_orders_and_modes_agree_with_differences(out):
    with jax.enable_x64(True):
        x, y, visible = inputs(out, dtype="float64")

        def f(x, y):
            """A tile is 0 where hidden, as operand and as result."""
            hidden_as_zero = lambda tile: jnp.where(visible, tile, 0)
            x = x if out == "tile" else hidden_as_zero(x)
            z = contract(x, y, out=out, dtype="float64", visible=visible, finite=True)
            return hidden_as_zero(z) if out == "tile" else z

        check_grads(jax.jit(f), (x, y), order=2, modes=("fwd", "rev"), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("out", OUTS)
def test_the_transpose_is_the_adjoint(out, operand):
    """`<ct, F x> = <F^T ct, x>` for a cotangent that is zero where hidden."""
    with jax.enable_x64(True):
        *args, visible = inputs(out, G, dtype="float64")
        f = partial(contract, out=out, dtype="float64", visible=visible, finite=True)
        linear = lambda z: f(*(z if i == operand else a for i, a in enumerate(args)))
        image = linear(args[operand])
        ct = np.random.default_rng(2).normal(size=image.shape)
        ct = np.where(visible, ct, 0) if out == "tile" else ct
        (back,) = jax.linear_transpose(linear, args[operand])(ct)
        np.testing.assert_allclose(jnp.vdot(ct, image), jnp.vdot(back, args[operand]), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out", OUTS)
def test_narrow_products_are_those_of_rounded_operands(out, dtype):
    x, y, visible = inputs(out)
    rounded = lambda z: np.asarray(jnp.asarray(z).astype(dtype).astype("float32"))
    near_x, near_y = rounded(x), rounded(y)
    found = contract(x, y, out=out, dtype=dtype, visible=visible, finite=True)
    again = contract(near_x, near_y, out=out, dtype=dtype, visible=visible, finite=True)
    assert found.dtype == jnp.float32
    assert np.array_equal(found, again)
    np.testing.assert_allclose(found, by_hand(near_x, near_y, visible, out), rtol=1e-6, atol=1e-6)
    assert np.abs(found - by_hand(x, y, visible, out)).max() > 1e-4


def test_vmap_takes_any_operand():
    x, y, visible = inputs("row")
    masks = np.stack([visible, visible & (np.arange(K) > 3)])
    xs = np.where(masks, np.stack([x, -2 * x]), 0)
    f = lambda x, y, visible: contract(
        x, y, out="row", dtype="float32", visible=visible, finite=False
    )
    found = jax.vmap(f, (0, None, 0))(xs, y, masks)
    for z, a, m in zip(found, xs, masks, strict=True):
        np.testing.assert_allclose(z, by_hand(a, y, m, "row"), rtol=1e-5, atol=1e-5)


def test_hidden_weights_have_no_influence():
    visible = jnp.zeros((1, 2, 3), bool).at[:, :, 0].set(True)
    x, y = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
    out = contract(x, y, out="row", dtype="float32", visible=visible, finite=True)
    assert np.array_equal(out, jnp.ones((1, 2, 4)))
