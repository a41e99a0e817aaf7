"""Experts over a mesh: parity, no token lost or doubled, losses, communication, errors."""

import re
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.oracle import assert_as_right_as, in_float64, once
from tests.sharding import experts_cases as cases
from tests.sharding.equal import mesh_of, on_one, run_on, values
from tests.sharding.experts_cases import DROPLESS, Case, E, F, M, T
from xform import cost, precision
from xform.sharding import TensorParallel, audit, meshes, shardings
from xform.sharding.experts import (
    ExpertParallel,
    Load,
    Routes,
    Routing,
    auxiliary,
    balance_loss,
    load_of,
    route,
    total,
    z_loss,
)
from xform.sharding.experts._places import by_expert, digits, places, undigits

AXES = ("dp", "cp", "tp", "ep")
SIGMOID = Routing(E, 3, "sigmoid", scale=2.5)
CAPACITY = Routing(E, 2, capacity=1.0, normalise=False)
GROUPED = Routing(E, 2, "sigmoid", normalise=False, capacity=1.5, group=2)


# ---- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(dp=2, tp=2, ep=2, shared=True), marks=pytest.mark.slow),
        Case(cp=2, tp=2, ep=2, routing=SIGMOID, sequence=True, shared=True),
        pytest.param(Case(dp=2, cp=2, ep=2, routing=CAPACITY), marks=pytest.mark.slow),
        Case(tp=2, ep=4, routing=GROUPED, sequence=True),
        Case(tp=2, ep=4, sequence=True, shared=True, both=True),
    ],
    ids=str,
)
def test_loss_and_every_gradient_equal_those_of_one_device(case, unchecked):
    report = cases.compared(case)
    assert {leaf.path for leaf in report.leaves} >= {"loss", "router", "gate", "down", "scale"}


def on(sizes: Any, routing: Routing, sequence: bool, shared: bool) -> Case:
    return Case(**sizes, routing=routing, sequence=sequence, shared=shared)


ALL = [
    on(sizes, routing, sequence, shared)
    for sizes in meshes(8, AXES)
    for routing, shared in ((DROPLESS, True), (SIGMOID, False), (CAPACITY, False), (GROUPED, True))
    for sequence in (False, True)
    if not sequence or 1 < sizes["tp"] <= T // sizes["cp"]
    if routing.group is None or T // sizes["cp"] % routing.group == 0
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_on_every_mesh_of_eight(case, unchecked):
    cases.compared(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(cp=2, tp=2, ep=2, routing=GROUPED, sequence=True),
        pytest.param(Case(dp=2, tp=2, ep=2, routing=GROUPED), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_something_is_dropped_and_counted_alike_on_every_mesh(case, unchecked):
    """What is dropped depends on groups alone, and is counted once."""
    p, batch = cases.params_of(), cases.batch_of()
    mesh, layer = mesh_of(dp=case.dp, cp=case.cp, tp=case.tp, ep=case.ep), cases.layer_of(case)
    tp = TensorParallel("tp", case.sequence)
    specs, of_rows = cases.specs_of(case)
    f = lambda p, x: total(layer(p, tp.positions(x, 1))[1])
    load = run_on(mesh, f, (specs, of_rows["x"]), P(), (p, batch["x"]))
    one = lambda p, x: cases.dense(x, p["router"], cases.gated(p), GROUPED, T, p["bias"])
    _, (_, _, chosen), dropped = on_one(one, p, batch["x"])
    assert load.dropped == dropped >= 10
    assert load.tokens == cases.B * T
    np.testing.assert_array_equal(load.chosen, np.bincount(chosen.ravel(), minlength=E))


# ---- no token lost or doubled --------------------------------------------------------------------

G, A = 2, 12


def experts_lists(experts: int, size: int):
    """Lists of experts: any, all one, or few, so that some have nothing to do."""
    one = st.integers(0, experts - 1)
    few = st.sampled_from([0, experts - 1])
    lists = [st.lists(x, min_size=size, max_size=size) for x in (one, few)]
    return st.one_of(*lists, one.map(lambda e: [e] * size))


@cache
def places_of(bins: int, size: int):
    return jax.jit(lambda x: places(x, 4, bins, size))


@pytest.mark.parametrize(("bins", "size"), [(1, A), (2, A), (4, 3), (2, 5)])
@given(st.data())
def test_a_choice_has_its_own_place_or_none(bins, size, data):
    """By expert and then by order; none where others, that came first, have taken them all."""
    expert = np.array(data.draw(st.tuples(experts_lists(4, A), experts_lists(4, A))), np.int32)
    choice, place, kept = map(np.asarray, places_of(bins, size)(expert))
    flat, bins_of = place.ravel(), expert // (4 // bins)
    for g in range(G):
        for b in range(bins):
            mine = sorted(np.flatnonzero(bins_of[g] == b), key=lambda a: (expert[g, a], a))
            here = [int(c) for c in choice[b, g] if c < G * A]
            assert here == [g * A + int(a) for a in mine[:size]]
    has = flat < bins * G * size
    np.testing.assert_array_equal(choice.ravel()[flat[has]], np.flatnonzero(has))
    assert kept.sum() == has.sum() == (choice < G * A).sum()
    np.testing.assert_array_equal(
        kept,
        [
            np.bincount(e[p < bins * G * size], minlength=4)
            for e, p in zip(expert, place, strict=True)
        ],
    )
    for x in (flat, choice.ravel()):  # a promise to the compiler
        assert len(set(x.tolist())) == x.size


@cache
def sent_and_read(dtype: str, size: int, width: int):
    def run(kept):
        rows = digits(kept, size, width).astype(dtype)
        return rows, undigits(rows, kept.shape[1], size)

    return jax.jit(run)


@given(st.sampled_from([1, 255, 256, 70_000]), st.sampled_from([1, 4]), st.data())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_counts_travel_exactly_in_every_dtype_that_is_taken(dtype, size, width, data):
    kept = data.draw(st.lists(st.integers(0, size), min_size=6, max_size=6))
    kept = np.array(kept, np.int32).reshape(2, 3)
    rows, read = sent_and_read(dtype, size, width)(kept)
    assert rows.shape[2] == width
    np.testing.assert_array_equal(read, kept)


def test_places_know_their_expert():
    found = by_expert(jnp.array([[2, 0, 1], [0, 0, 0], [0, 3, 1]]), 4)
    assert found.tolist() == [[0, 0, 2, 3], [3, 3, 3, 3], [1, 1, 1, 2]]


MARKS = np.arange(1.0, E + 1) ** 3
ON_FOUR = dict(ep=4, tp=2)
TOKENS = 24


@cache
def sums_on(bound: float | None):
    """A function of routes that sums the marks of a token's experts, on four devices.

    Its kernel leaves rubbish in rows that belong to no expert.
    """

    def product(rows, matrices, sizes):
        filled = jnp.arange(len(rows))[:, None] < jnp.sum(sizes)
        return jnp.where(filled, jax.lax.ragged_dot(rows, matrices, sizes), jnp.nan)

    ep, routing = ExpertParallel("ep", TensorParallel("tp"), product), Routing(E, 2, bound=bound)

    def f(x, experts, weights, marks):
        matrices = marks[:, None, None] * jnp.eye(1)[None]
        routes = Routes(experts, weights, jnp.zeros((*experts.shape[:-1], E)))
        x = jax.lax.pcast(x, "tp", to="varying")
        y, dropped = ep.apply(x, routes, lambda rows, dot: dot(rows, matrices), routing)
        return jax.lax.psum(y, "tp") / 2, jax.lax.psum(dropped, "ep")

    mesh, rows = mesh_of(**ON_FOUR), P(None, "ep")
    specs = (rows, rows, rows, P("ep"))
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(rows, P())))

    def run(experts, weights):
        x = np.arange(1.0, TOKENS + 1)[None, :, None].astype(np.float32)
        args = (x, experts[None], weights[None].astype(np.float32), MARKS.astype(np.float32))
        y, dropped = f(*jax.device_put(args, shardings(mesh, specs)))
        return np.asarray(y)[0, :, 0], int(dropped)

    return run


PAIRS = st.lists(
    st.tuples(st.integers(0, E - 1), st.integers(1, E - 1)), min_size=TOKENS, max_size=TOKENS
)


@given(st.one_of(PAIRS, PAIRS.map(lambda pairs: [pairs[0]] * TOKENS)))
def test_every_token_meets_each_of_its_experts_once(pairs):
    """Whole numbers: a choice that is lost or doubled is another sum."""
    first, step = np.array(pairs, np.int32).T
    experts = np.stack([first, (first + step) % E], -1).astype(np.int32)
    weights = np.tile([1.0, 3.0], (TOKENS, 1))
    expected = np.arange(1, TOKENS + 1) * (weights * MARKS[experts]).sum(-1)
    y, dropped = sums_on(None)(experts, weights)
    np.testing.assert_array_equal(y, expected)
    assert dropped == 0

    # With a bound of twice an even share, a device sends another six choices.
    y, dropped = sums_on(2.0)(experts, weights)
    device = experts.reshape(4, -1, 2) // 2
    beyond = [max(0, int((part == d).sum()) - 6) for part in device for d in range(4)]
    assert dropped == sum(beyond)
    lost = np.isnan(y)
    assert lost.any() == (dropped > 0)
    np.testing.assert_array_equal(y[~lost], expected[~lost])


# ---- the router ----------------------------------------------------------------------------------


def test_ties_go_to_the_lower_number_and_nan_to_its_token_alone():
    x = jnp.array([[[0, 0], [1, 1], [np.nan, 0], [2, 1]]], jnp.float32)
    weight = jnp.array([[1, 0, 0, 1], [0, 0, 0, 1]], jnp.float32)
    p = {"in": jnp.ones((4, 2, 2))}
    for score in ("softmax", "sigmoid"):
        routing = Routing(4, 2, score)
        routes = route(x, weight, routing)
        assert routes.experts[0].tolist()[:2] == [[0, 1], [3, 0]]
        assert all(len({*row}) == 2 for row in routes.experts[0].tolist())
        assert np.isnan(routes.weights[0]).all(-1).tolist() == [False, False, True, False]
        expert = lambda rows, dot: dot(jnp.nan_to_num(rows), p["in"])
        routed = partial(ExpertParallel().routed, expert=expert, routing=routing)
        y, load = once(routed, x, weight)
        assert np.isnan(y[0]).all(-1).tolist() == [False, False, True, False]
        assert load.chosen.sum() == 8
        assert np.isnan(balance_loss(load))


@cache
def routed_by_identity():
    return jax.jit(lambda x: route(x, jnp.eye(4), Routing(4, 3)))


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0, np.nan]), min_size=8, max_size=8))
def test_every_token_has_experts_that_differ_whatever_its_scores(numbers):
    x = np.array(numbers, np.float32).reshape(1, 2, 4)
    experts, weights, _ = map(np.asarray, routed_by_identity()(x))
    for row, found, weight in zip(x[0], experts[0], weights[0], strict=True):
        lost = np.isnan(row).any()
        best = range(4) if lost else sorted(range(4), key=lambda e: (-row[e], e))
        assert found.tolist() == list(best)[:3]
        assert np.isnan(weight).all() if lost else abs(weight.sum() - 1) < 1e-6


def test_weights_are_scores_normalised_or_not():
    x, weight = values(3, x=(1, 5, M), w=(M, E)).values()
    logits = x @ weight
    with jax.enable_x64(True):
        x, weight = jnp.asarray(x), jnp.asarray(weight)
        kinds: tuple[tuple[Any, np.ndarray], ...] = (
            ("softmax", np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)),
            ("sigmoid", 1 / (1 + np.exp(-logits))),
        )
        for score, made in kinds:
            best = np.sort(made, -1)[..., :-4:-1]
            found = route(x, weight, Routing(E, 3, score, normalise=False, scale=2.0))
            np.testing.assert_allclose(found.weights, 2 * best, rtol=1e-12)
            found = route(x, weight, Routing(E, 3, score))
            np.testing.assert_allclose(found.weights, best / best.sum(-1, keepdims=True))
            np.testing.assert_allclose(found.weights.sum(-1), 1)
        # A bias chooses, and does not weigh.
        bias = jnp.where(jnp.arange(E) == 5, 9.0, 0.0)
        found = route(x, weight, Routing(E, 1, normalise=False), bias)
        assert (np.asarray(found.experts) == 5).all()
        np.testing.assert_allclose(found.weights[..., 0], jax.nn.softmax(logits, -1)[..., 5])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_loss_teaches_a_router_of_one_expert_for_each_token(score):
    """Its weight is its score, and not that score over itself."""
    p, x = jax.tree.map(jnp.float32, (few(), cases.batch_of()["x"][:1]))
    grads = once(jax.grad(partial(mean_square, Routing(4, 1, score))), p, x)
    assert np.abs(grads["router"]).max() > 1e-4
    routes = route(x, p["router"], Routing(4, 1, score))
    assert (routes.weights < 1).all()
    assert [Routing(4, k).normalised for k in (1, 2)] == [False, True]
    with pytest.raises(ValueError, match=r"`normalise` of one weight is always 1, from which"):
        Routing(4, 1, score, normalise=True)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_sum_to_one_and_have_gradients_where_scores_underflow(score):
    routing, weight = Routing(4, 2, score), jnp.eye(4)
    x = jnp.array([[-45.0, -46, -400, -500], [-200, -201, -400, -500]], jnp.float32)
    first = lambda x: route(x, weight, routing).weights[:, 0]
    share = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(once(first, x), share, rtol=2e-5)
    grad = once(jax.grad(lambda x: jnp.sum(first(x))), x)
    expected = share * (1 - share) * np.array([1.0, -1, 0, 0])
    np.testing.assert_allclose(grad, np.tile(expected, (2, 1)), rtol=2e-5, atol=1e-7)
    load = once(lambda x: load_of(route(x, weight, routing), routing), x)
    np.testing.assert_allclose(load.scores, [2 * share, 2 - 2 * share, 0, 0], rtol=2e-5, atol=1e-7)


def test_a_token_that_is_nan_takes_a_place_and_gives_none_away():
    """With a capacity: what another then lacks is counted, and is not NaN."""
    x = jnp.array([[[np.nan, 0.0], [1.0, 0.0]]], jnp.float32)
    routing, p = Routing(2, 1, capacity=1.0), jnp.ones((2, 2, 2))
    expert = lambda rows, dot: dot(jnp.nan_to_num(rows), p)
    y, load = once(partial(ExpertParallel().routed, expert=expert, routing=routing), x, jnp.eye(2))
    assert np.isnan(y[0]).all(-1).tolist() == [True, False]
    assert load.dropped == 1
    assert (y[0, 1] == 0).all()


def test_the_router_is_float32_under_every_policy():
    """Of a stream in bfloat16 too: scores are those of float32 numbers."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(M, E)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(1, T, M)), jnp.bfloat16)
    routes = route(x, weight, DROPLESS)
    assert routes.logits.dtype == routes.weights.dtype == jnp.float32
    np.testing.assert_allclose(
        routes.logits,
        np.asarray(x, np.float64) @ np.asarray(weight, np.float64),
        rtol=1e-5,
        atol=1e-6,
    )
    wide = x.astype(jnp.float32)
    logits = lambda x, w: route(x, w, DROPLESS).logits
    grad = lambda f: jax.value_and_grad(lambda w: jnp.sum(f(wide, w) ** 2))
    own = once(grad(logits), weight)
    for policy in ("bf16", "fp8"):
        found = once(grad(precision(logits, policy)), weight)
        jax.tree.map(np.testing.assert_array_equal, found, own)


# ---- losses --------------------------------------------------------------------------------------


def test_even_use_has_a_balance_of_one_and_a_single_expert_of_all():
    even = Load(jnp.full(4, 6.0), jnp.full(4, 3.0), jnp.array(8.0), jnp.array(12.0), jnp.array(0.0))
    assert balance_loss(even) == 1
    assert z_loss(even) == 8 / 12
    one = even._replace(chosen=jnp.array([24.0, 0, 0, 0]), scores=jnp.array([12.0, 0, 0, 0]))
    assert balance_loss(one) == 4
    none = jax.tree.map(jnp.zeros_like, even)
    assert balance_loss(none) == z_loss(none) == 0
    layers = jax.tree.map(lambda *x: jnp.stack(x), even, one)
    assert balance_loss(layers).tolist() == [1, 4]
    assert auxiliary(layers, jnp.array(3), balance=1.0, z=0.0) == 15


def test_loads_of_layers_follow_one_another():
    load = Load.none(jnp.ones((2, 3)), experts=4, layers=3)
    one = jax.tree.map(lambda x: x[0] + 1, load)
    for i in range(3):
        load = load.then(jax.tree.map(lambda x, i=i: x * i, one))
    assert load.tokens.tolist() == [0, 1, 2]
    assert load.chosen[:, 2].tolist() == [0, 1, 2]


# ---- precision, determinism, forward mode --------------------------------------------------------


def mean_square(routing: Routing, params: dict, x):
    p = {name: w.astype(x.dtype) for name, w in params.items()}
    y, _ = ExpertParallel().routed(x, p["router"], cases.swiglu(p), routing)
    return jnp.mean(y.astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2)


def plain_mean_square(routing: Routing, params: dict, x):
    p = {name: w.astype(x.dtype) for name, w in params.items()}
    with jax.numpy_rank_promotion("allow"):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        y, *_ = cases.dense(x, p["router"], cases.gated(p), routing, T, wide=wide)
        return jnp.mean(y.astype(wide) ** 2)


def few() -> dict:
    """The parameters of four experts."""
    p = cases.params_of()
    return {"router": p["router"][:, :4]} | {name: p[name][:4] for name in ("gate", "up", "down")}


@pytest.mark.parametrize("capacity", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_gradients_in_bfloat16_are_as_right_as_those_of_a_plain_loop(capacity):
    routing = Routing(4, 2, capacity=capacity)
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16)
    params, x = jax.tree.map(narrow, (few(), cases.batch_of()["x"][:2]))
    grad = lambda f: lambda p, x: jax.grad(f, argnums=(1, 2))(routing, p, x)
    truth = in_float64(grad(plain_mean_square), params, x)
    assert_as_right_as(
        once(grad(mean_square), params, x), once(grad(plain_mean_square), params, x), truth
    )


@cache
def small_step(routing: Routing):
    """Value and gradients on a mesh, compiled, with its arguments."""
    case = Case(tp=2, ep=4, routing=routing)
    mesh, (specs, of_rows) = mesh_of(dp=1, cp=1, tp=2, ep=4), cases.specs_of(case)
    specs = {name: specs[name] for name in ("router", "gate", "up", "down", "bias")}
    layer = cases.layer_of(case)

    def loss(p, x):
        y, load = layer(p, x)
        y = jax.lax.psum(jnp.sum(y**2), ("dp", "cp", "ep"))
        return y + jnp.sum(balance_loss(total(load)))

    f = jax.shard_map(loss, mesh=mesh, in_specs=(specs, of_rows["x"]), out_specs=P())
    params = {name: cases.params_of()[name].astype("float32") for name in specs}
    args = (params, cases.batch_of()["x"].astype("float32"))
    return (
        mesh,
        jax.jit(jax.value_and_grad(f)),
        jax.device_put(args, shardings(mesh, (specs, of_rows["x"]))),
    )


def test_the_same_bits_every_time(unchecked):
    _, step, args = small_step(DROPLESS)
    first, second = (jax.device_get(step(*args)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert all(np.abs(x).max() > 0 for name, x in first[1].items() if name != "bias")


def test_forward_mode_equals_reverse_mode():
    x, direction = values(8, x=(1, T, M), direction=(1, T, M)).values()
    f = lambda x: mean_square(Routing(4, 2), jax.tree.map(jnp.asarray, few()), x)
    both = lambda x: (jax.jvp(f, (x,), (direction,))[1], jnp.vdot(jax.grad(f)(x), direction))
    found, expected = on_one(both, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_it_lowers_for_every_platform():
    p, x = jax.tree.map(jnp.float32, few()), jnp.ones((1, T, M))
    for routing in (Routing(4, 2), Routing(4, 2, capacity=1.0)):
        step = jax.jit(jax.value_and_grad(lambda p, x, r=routing: mean_square(r, p, x)))
        traced = step.trace(p, x)
        for platform in ("tpu", "cuda"):
            assert "sort" in traced.lower(lowering_platforms=(platform,)).as_text()


# ---- communication and cost ----------------------------------------------------------------------


def exchanges(f, mesh, args) -> list[tuple]:
    report = audit(f, args, mesh, target=None)
    return [(m.op, m.axes, m.rules) for m in report.messages if m.op == "all-to-all"]


@pytest.mark.parametrize(
    "routing",
    [DROPLESS, pytest.param(CAPACITY, marks=pytest.mark.slow)],
    ids=["dropless", "capacity"],
)
def test_two_exchanges_forward_two_back_and_nothing_undeclared(routing, unchecked):
    case = Case(tp=2, ep=4, routing=routing)
    mesh, _, args = small_step(routing)
    specs, of_rows = cases.specs_of(case)
    specs = {name: specs[name] for name in args[0]}
    layer = cases.layer_of(case)
    forward = jax.shard_map(
        lambda p, x: layer(p, x)[0],
        mesh=mesh,
        in_specs=(specs, of_rows["x"]),
        out_specs=of_rows["x"],
    )
    one = ("all-to-all", ("ep",), ("experts.exchange",))
    assert exchanges(jax.jit(forward), mesh, args) == [one] * 2

    def loss(p, x):
        return jnp.sum(forward(p, x) ** 2)

    assert exchanges(jax.jit(jax.grad(loss, argnums=(0, 1))), mesh, args) == [one] * 4


def test_products_are_counted_by_the_rows_that_there_are():
    """On one device, those of the experts that a token goes to, exactly; on several, by places."""
    params = {n: w for n, w in cases.params_of().items() if n in ("router", "gate", "up", "down")}
    x = cases.batch_of()["x"]
    tokens, each = cases.B * T, 2 * 3 * M * F
    router = 2 * M * E
    found = cost(lambda p, x: mean_square(DROPLESS, p, x))(params, x)
    assert found.matrix_flops == tokens * (router + 2 * each)
    found = cost(lambda p, x: mean_square(CAPACITY, p, x))(params, x)
    assert found.matrix_flops == tokens * router + cases.B * E * CAPACITY.places(T) * each
    assert CAPACITY.places(T) * E == 2 * T


# ---- errors --------------------------------------------------------------------------------------


def test_all_that_makes_no_sense_is_named_at_once(unchecked):
    with pytest.raises(ValueError, match=r"^Routing: ") as error:
        Routing(4, 5, cast(Any, "relu"), scale=0.0, capacity=0.0, group=0, bound=-1.0)
    for words in (
        "`top_k` is 5; needed is 1 to 4, since a token goes to an expert once",
        "`score` is 'relu'; there is 'softmax' and 'sigmoid'",
        "`scale` is 0.0; needed is a number above 0",
        "`capacity` is 0.0; needed is a number above 0, or None",
        "`bound` is -1.0; needed is a number above 0, or None",
        "`group` is 0; needed is at least 1, or None",
        "`bound` is of routing that drops nothing",
    ):
        assert words in str(error.value)
    with pytest.raises(
        ValueError, match=r"`experts` is 0; .*`group` is of a `capacity`, and there"
    ):
        Routing(0, 1, group=4)
    with pytest.raises(ValueError, match=r"'tp' deals out whole experts and splits each"):
        ExpertParallel(("ep", "tp"), TensorParallel("tp"))


def test_sizes_are_whole_numbers_and_axes_differ(unchecked):
    with pytest.raises(TypeError, match=r"`experts` is 8.5; .* `top_k` is 2.0; .* `group` is 1.5"):
        Routing(cast(Any, 8.5), cast(Any, 2.0), capacity=1.0, group=cast(Any, 1.5))
    with pytest.raises(TypeError, match=r"`top_k` is True; needed is a whole number"):
        Routing(8, True)
    for axis in ((), ("ep", "ep")):
        with pytest.raises(ValueError, match=rf"`axis` is {re.escape(repr(axis))}; needed is a"):
            ExpertParallel(axis)


@pytest.mark.parametrize(
    ("ep", "check", "message"),
    [
        (ExpertParallel("nope"), True, r"there is no 'nope' among the axes of a `jax.shard_map`"),
        (ExpertParallel("ep", TensorParallel("t")), True, r"there is no 't' among the axes"),
        (ExpertParallel(("ep", "p"), TensorParallel("t")), True, r"no 'p' and no 't' among"),
        (ExpertParallel("ep"), False, r"has `check_vma=False`, .*: leave it True"),
    ],
)
def test_axes_that_are_not_there_are_named(ep, check, message, unchecked):
    f = lambda x: ep.routed(x, jnp.ones((M, E)), lambda rows, dot: rows, DROPLESS)[0]
    on = jax.shard_map(f, mesh=mesh_of(dp=2, ep=4), in_specs=P(), out_specs=P(), check_vma=check)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on, jnp.ones((4, T, M)))


def test_a_call_outside_of_a_mesh_names_the_axis(unchecked):
    routed = ExpertParallel("ep").routed
    with pytest.raises(ValueError, match=r"no 'ep' among .* around this call: call it inside"):
        routed(jnp.ones((1, T, M)), jnp.ones((M, E)), lambda rows, dot: rows, DROPLESS)


@pytest.mark.parametrize("routing", [DROPLESS, CAPACITY], ids=["dropless", "capacity"])
def test_what_others_return_is_checked(routing, unchecked):
    x, weight, call = jnp.ones((2, T, M)), jnp.ones((M, E)), ExpertParallel()
    same = lambda rows, dot: rows
    shape = (E, 2 * routing.places(T), M) if routing.capacity else (2 * T * 2, M)
    fewer = (shape[0] - 1, *shape[1:])
    message = f"`expert` returned {fewer}; needed is {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        call.routed(x, weight, lambda rows, dot: rows[1:], routing)
    message = f"`shared` returned {(2, T, 1)}; needed is {(2, T, M)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        call.routed(x, weight, same, routing, shared=lambda x: x[..., :1])

    experts, logits = jnp.zeros((2, T - 1, 3)), jnp.zeros((2, T, E))
    routes = Routes(cast(Any, experts), jnp.ones((2, T, 1)), logits)
    with pytest.raises(ValueError, match=r"^ExpertParallel: ") as error:
        call.apply(x, routes, same, routing)
    for words in (
        f"`routes.experts` is {experts.shape}; needed is {(2, T, 2)}, of each token",
        f"`routes.weights` is {(2, T, 1)}; needed is {(2, T, 2)}, of each token",
        "`routes.experts` is float32; needed are whole numbers",
    ):
        assert words in str(error.value)


def test_what_does_not_fit_is_named_at_once(unchecked):
    mesh, routing = mesh_of(dp=2, ep=4), Routing(6, 2, capacity=1.0, group=3)

    def f(x, router):
        return ExpertParallel("ep").routed(x, router, lambda rows, dot: rows, routing, bias=router)

    args = jax.device_put((np.ones((4, 8, 5)), np.ones((4, 8))), shardings(mesh, (P("dp"), P())))
    with pytest.raises(ValueError, match=r"^ExpertParallel: ") as error:
        jax.shard_map(f, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P())(*args)
    for words in (
        "experts=6 is no multiple of the devices of ep=4",
        "the stream is the same on all devices of 'ep': split tokens over it too",
        "`router` is (4, 8); needed is (5, 6)",
        "`bias` is (4, 8); needed is (6,)",
        "`group` is 3, and a device has 8 positions of a row, which it must divide",
    ):
        assert words in str(error.value)


def test_matrices_of_another_number_of_experts_are_refused(unchecked):
    for routing in (DROPLESS, CAPACITY):
        expert = lambda rows, dot: dot(rows, jnp.ones((E, M + 1, F)))
        message = f"and matrices ({E}, {M + 1}, {F}); needed are matrices ({E}, {M}, any)"
        call = partial(ExpertParallel().routed, expert=expert, routing=routing)
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(call, jnp.ones((1, T, M)), jnp.ones((M, E)))
    x = jnp.ones((1, T, M), jnp.int32)
    with pytest.raises(ValueError, match=r"the stream is int32\[1,8,6\]; needed is a floating"):
        ExpertParallel().routed(x, jnp.ones((M, E)), lambda rows, dot: rows, DROPLESS)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4"])
def test_a_dtype_in_which_counts_do_not_travel_is_refused(dtype, unchecked):
    x = jnp.ones((1, T, M), dtype)
    routes = Routes(*[jnp.zeros((1, T, 2), kind) for kind in ("int32", "float32", "float32")])
    same = lambda rows, dot: rows
    message = rf"the stream is {dtype}, in which counts .* needed is bfloat16 or wider"
    with pytest.raises(ValueError, match=message):
        ExpertParallel().routed(x, jnp.ones((M, E)), same, DROPLESS)
    with pytest.raises(ValueError, match=message):
        ExpertParallel().apply(x, routes, same, DROPLESS)
