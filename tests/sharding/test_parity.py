"""Sharded models beside one device: equal when right, and named leaf by leaf when wrong."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.sharding.cases import Case, checker, draw, faulty, right
from xform.sharding import ParityError, make_mesh, meshes, parity
from xform.sharding._parity import compare

P = jax.P
# Two in a row share a program; together these have one of everything.
SUITE = (*range(80, 84), *range(86, 94), *range(96, 102), 218, 219)
ALL = sorted({*range(100, 400)} - {*SUITE})


# ---- random models on random meshes --------------------------------------------------------------


def faults(case: Case):
    """The faults that this case can have: where a sum is, and over how many devices."""
    lies, m = case.layout, case.model
    over = {"rows": lies.devices_with_rows, "total": lies.devices_with_rows, "row": lies.tp}
    over |= {"shared": lies.tp} if m.norms or lies.sequence else {}
    if m.routing:
        over["experts"] = lies.tp
        over["routers"] = lies.devices_with_rows * (lies.microbatches == 1)
    return [(site, n) for site, n in over.items() if n > 1]


@jax.enable_checks(False)  # of jaxprs, which take as long as all the rest
def is_equal_and_every_fault_is_caught(seed: int):
    case = draw(seed)
    check = checker(case)
    report = check(right())
    assert not report.wrong, f"{case}: {report.complaint()}"
    assert max(leaf.error for leaf in report.leaves) < 1e-12
    assert faults(case)
    for site, n in faults(case):
        dropped = check(faulty(site, "dropped", n))
        assert dropped.wrong, f"{case}: a sum left out at {site!r}"
        twice = check(faulty(site, "doubled", n))
        assert twice.wrong, f"{case}: a sum done twice at {site!r}"
        if site in ("rows", "total", "shared"):  # whose sum is the last thing that is done
            assert all(leaf.ratio == pytest.approx(n) for leaf in twice.wrong)
            axis = "tp" if site == "shared" else ""
            assert all(axis in f"{leaf.axes}" and leaf.axes for leaf in twice.wrong)
            assert f"is {n} × the right one, the size of" in twice.complaint()
        if site == "total":
            assert len(twice.wrong) == len(twice.leaves)


@pytest.mark.parametrize("seed", SUITE)
def test_a_random_model_on_a_random_mesh_equals_one_device(seed, unchecked):
    is_equal_and_every_fault_is_caught(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_another_random_model_equals_one_device(seed, unchecked):
    is_equal_and_every_fault_is_caught(seed)


def test_the_cases_of_the_suite_have_one_of_everything():
    cases = [draw(seed) for seed in SUITE]
    models, layouts = [c.model for c in cases], [c.layout for c in cases]
    for name in ("tied", "sinks", "norms"):
        assert {getattr(m, name) for m in models} == {True, False}
    assert {m.attention for m in models} == {"dense", "flex"}
    assert {m.heads // m.groups for m in models} == {1, 2}
    assert {lies.tp for lies in layouts} == {1, 2, 4, 8}
    assert {lies.zero for lies in layouts} == {None, 1, 3}
    assert {lies.overlap for lies in layouts} == {None, "ring"}
    assert {lies.microbatches for lies in layouts} == {1, 2}
    assert any(lies.dp > 1 and lies.cp > 1 and lies.tp > 1 for lies in layouts)
    assert {c.ignored for c in cases} == {0.0, 0.3, 0.9}
    with_experts = [c for c in cases if c.model.routing]
    assert 0 < len(with_experts) < len(cases)
    for name, values in (("score", {"softmax", "sigmoid"}), ("capacity", {None, 1.0})):
        assert {getattr(c.model.routing, name) for c in with_experts} == values
    lie = [c.layout for c in with_experts]
    for axis in ("dp", "cp", "tp", "ep"):
        assert max(getattr(lies, axis) for lies in lie) > 1
    assert any(lies.ep > 1 and lies.cp > 1 for lies in lie)


def test_meshes_are_all_that_devices_can_make():
    found = list(meshes(8, ("dp", "cp", "tp")))
    assert len(found) == len({tuple(m.items()) for m in found}) == 10
    assert all(np.prod(list(m.values())) == 8 for m in found)


# ---- faults as people make them ------------------------------------------------------------------

PARAMS = {"w": np.linspace(-1, 1, 12).reshape(4, 3), "scale": np.linspace(1, 2, 3)}
X = np.sin(np.arange(32.0)).reshape(8, 4)


def rows_of_a_model(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2 * params["scale"][None])


def mesh():
    return make_mesh(dp=2, tp=4, devices=jax.devices()[:8])


def test_a_cast_over_an_axis_too_many_multiplies_gradients_and_leaves_the_loss():
    """JAX's types have nothing against it: activations vary over tp and are equal there."""

    def step(params, x):
        x = lax.pcast(x, "tp", to="varying")
        loss, grads = jax.value_and_grad(rows_of_a_model)(params, x)
        return lax.pmax(lax.psum(loss, "dp"), "tp"), grads

    check = parity(step, mesh(), (P(), P("dp")), gives_gradients=True)
    with pytest.raises(ParityError) as error:
        check(PARAMS, X)
    assert [leaf.path for leaf in error.value.report.wrong] == ["scale", "w"]
    for name in ("scale", "w"):
        text = f"the gradient of '{name}' is 4 × the right one, the size of tp"
        assert text in str(error.value)
    assert "on dp=2 × tp=4, 2 of 3 of loss and gradients" in str(error.value)


def test_a_mean_over_devices_that_should_be_a_sum():
    loss = lambda params, x: lax.pmean(rows_of_a_model(params, x), "dp")
    check = parity(loss, mesh(), (P(), P("dp")), reference=rows_of_a_model)
    with pytest.raises(ParityError, match=r"loss is 1/2 × the right one, the size of dp"):
        check(PARAMS, X)


def test_a_sum_that_is_left_out():
    """The first rows stand for all of them; no gradient is a multiple of the right one."""

    def loss(params, x):
        first = lax.axis_index("dp") == 0
        return lax.psum(jnp.where(first, rows_of_a_model(params, x), 0), "dp")

    report = parity(loss, mesh(), (P(), P("dp")), reference=rows_of_a_model, strict=False)(
        PARAMS, X
    )
    assert [leaf.ratio for leaf in report.wrong[1:]] == [None, None]
    assert "the gradient of 'w' is off by" in report.complaint()


def test_a_sum_left_out_is_a_type_error_before_it_is_a_wrong_number():
    check = parity(rows_of_a_model, mesh(), (P(), P("dp")))
    with pytest.raises(ValueError, match=r"out_specs(.|\n)*dp"):
        check(PARAMS, X)


def test_ratios_of_two_axes_of_one_size_name_both():
    loss = lambda params, x: 2 * lax.psum(rows_of_a_model(params, x), "dp")
    square = make_mesh(dp=2, tp=2, devices=jax.devices()[:4])
    check = parity(loss, square, (P(), P("dp")), reference=rows_of_a_model)
    with pytest.raises(ParityError, match=r"'w' is 2 × the right one, the size of dp or tp"):
        check(PARAMS, X)


def test_a_right_one_passes_on_every_mesh():
    loss = lambda params, x: lax.psum(rows_of_a_model(params, x), ("dp", "cp"))
    for sizes in meshes(4, ("dp", "cp")):
        on = make_mesh(**sizes, devices=jax.devices()[:4])
        report = parity(loss, on, (P(), P(("dp", "cp"))))(PARAMS, X)
        assert {leaf.path for leaf in report.leaves} == {"loss", "w", "scale"}
        assert "loss is right to" in str(report)


# ---- the comparison ------------------------------------------------------------------------------

MESH = {"dp": 2, "cp": 3, "tp": 4}


@given(st.sampled_from([2, 3, 4, 6, 8, 12, 24]), st.booleans(), st.integers(0, 99))
def test_a_whole_ratio_is_named_with_axes_of_that_size(n, up, seed):
    g = np.random.default_rng(seed).normal(size=(5, 3))
    found = g * n if up else g / n
    (_, leaf) = compare((1.0, {"g": found}), (1.0, {"g": g}), MESH, rtol=1e-8).leaves
    assert leaf.wrong
    assert leaf.ratio == pytest.approx(n if up else 1 / n)
    assert leaf.axes
    assert all(np.prod([MESH[axis] for axis in axes]) == n for axes in leaf.axes)
    assert f"is {n if up else f'1/{n}'} × the right one" in leaf.text


@given(st.floats(0.1, 30), st.integers(0, 99))
def test_another_ratio_is_an_error_without_axes(ratio, seed):
    near = min(abs(ratio - round(ratio)), abs(1 / ratio - round(1 / ratio)))
    g = np.random.default_rng(seed).normal(size=7)
    (_, leaf) = compare((1.0, [g * ratio]), (1.0, [g]), MESH, rtol=1e-8).leaves
    if near > 1e-3:
        assert leaf.wrong
        assert leaf.axes == ()
        assert "is off by" in leaf.text


def test_rounding_passes_and_the_smallest_fault_does_not():
    g = np.random.default_rng(0).normal(size=100)
    one = lambda x: compare((1.0, [x]), (1.0, [g]), MESH, rtol=1e-8).wrong
    assert not one(g * (1 + 1e-12))
    assert one(g * (1 + 1e-7))
    assert one(g + 1e-7 * (np.arange(100) == 3))
    assert one(np.where(np.arange(100) == 3, np.nan, g))
    assert one(g[:99])


def test_noise_of_a_gradient_that_is_zero_passes_and_a_lost_one_does_not():
    g, zero = np.ones(4), np.zeros(4)
    close = compare((1.0, [g, zero + 1e-16]), (1.0, [g, zero]), MESH, rtol=1e-8)
    assert not close.wrong
    lost = compare((1.0, [zero, zero]), (1.0, [g, zero]), MESH, rtol=1e-8)
    assert [leaf.text for leaf in lost.wrong] == ["the gradient of '0' is 0 where it should not be"]
    turned = compare((1.0, [-g, zero]), (1.0, [g, zero]), MESH, rtol=1e-8)
    assert "is -1 × the right one" in turned.complaint()


def test_one_program_serves_all_batches():
    traces = 0

    def loss(params, x):
        nonlocal traces
        traces += 1
        return lax.psum(rows_of_a_model(params, x), "dp")

    check = parity(loss, mesh(), (P(), P("dp")))
    check(PARAMS, X)
    before = traces
    check(PARAMS, 2 * X)
    assert traces == before


def test_a_model_in_float32_needs_a_wider_tolerance():
    def loss(params, x, *, rows=rows_of_a_model):
        narrow = partial(jax.tree.map, lambda x: x.astype(jnp.float32))
        return lax.psum(rows(narrow(params), narrow(x)), "dp")

    rough = parity(loss, mesh(), (P(), P("dp")), reference=rows_of_a_model, strict=False)
    assert rough(PARAMS, X).wrong
    assert not parity(loss, mesh(), (P(), P("dp")), reference=rows_of_a_model, rtol=1e-4)(
        PARAMS, X
    ).wrong
