"""`remat`: the values and derivatives of the function, whatever is saved."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xform import causal, flex_attention, linear_cross_entropy, remat

BUDGETS = ["all", "none", 0.5]


@pytest.fixture(autouse=True)
def broadcasting():
    """As models do it, in numbers in which only a fault can be seen."""
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64) * 0.4


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def mlp(p, x):
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def params(*lead):
    return dict(up=normal(1, *lead, 8, 16), down=normal(2, *lead, 16, 8))


def scanned(p, x):
    return jax.lax.scan(lambda x, p: (mlp(p, x), x[0, 0]), x, p)


def unrolled(p, x):
    layers = zip(p["up"], p["down"], strict=True)
    for up, down in layers:
        x = mlp(dict(up=up, down=down), x)
    return x, x[0]


def sliced(p, x):
    for i in range(len(p["up"])):
        x = mlp(jax.tree.map(lambda w: w[i], p), x)  # noqa: B023
    return x


def branched(p, x):
    wide = lambda p, x: mlp(p, x)
    thin = lambda p, x: x * jnp.tanh(x @ p["up"] @ p["down"])
    return jax.lax.cond(x.sum() > 0, wide, thin, p, x)


def own_rule(p, x):
    @jax.custom_vjp
    def double(x):
        return jnp.tanh(2 * x)

    double.defvjp(
        lambda x: (jnp.tanh(2 * x), checkpoint_name(jnp.tanh(2 * x), "t")),
        lambda t, ct: (2 * ct * (1 - t**2),),
    )
    return double(x @ p["up"]) @ p["down"]


def attention(p, x):
    q = (x @ p["up"]).reshape(1, -1, 2, 8)
    out = flex_attention(q, q[:, :, :1] * 2, jnp.sin(q[:, :, :1]), mask_mod=causal())
    loss, _ = linear_cross_entropy(
        out.reshape(-1, 16) @ p["down"], p["up"], jnp.arange(x.shape[0]) % 16
    )
    return loss


def dropout(p, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, (x.shape[0], 16))
    return jnp.where(keep, jax.nn.relu(x @ p["up"]), 0) @ p["down"]


def nested(p, x):
    inner = remat(mlp, budget="none")
    return inner(p, jax.checkpoint(mlp)(p, inner(p, x)))


def meshed(p, x):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    def run(p, x):
        total = jax.lax.pcast(jax.lax.psum(x, "d"), "d", to="varying")
        return mlp(p, x) + jnp.tanh(total @ p["up"]) @ p["down"]

    return run(p, x)


PROGRAMS = {
    "layer": (mlp, ()), "scan": (scanned, (9,)), "unrolled": (unrolled, (6,)),
    "sliced": (sliced, (5,)),
    "cond": (branched, ()), "custom_vjp": (own_rule, ()), "attention": (attention, ()),
    "dropout": (dropout, ()), "nested": (nested, ()),
}  # fmt: skip


def total(f):
    """A scalar that depends on every result."""

    def run(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in leaves)

    return run


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


# Plans of these take longest; their budgets hold in `test_budget`, here the other programs'.
DEAR = ("unrolled", "sliced", "attention")


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param(name, budget, marks=pytest.mark.slow if name in DEAR and budget == 0.5 else ())
        for name in PROGRAMS
        for budget in BUDGETS
    ],
)
def test_values_and_gradients_are_those_of_the_function(name, budget):
    f, lead = PROGRAMS[name]
    p, x = params(*lead), normal(0, 4, 8)
    g = remat(f, budget=budget)
    same(jax.jit(g)(p, x), f(p, x))
    found = jax.jit(jax.value_and_grad(total(g), (0, 1)))(p, x)
    same(found, jax.value_and_grad(total(f), (0, 1))(p, x))


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("unrolled", "sliced", "cond", "attention")
]


@pytest.mark.parametrize("name", ["layer", "scan", "dropout", *SLOW])
def test_forward_mode_and_second_order(name):
    f, lead = PROGRAMS[name]
    p, x = params(*lead), normal(0, 4, 8)
    g = remat(f, budget="none")
    moved = jax.tree.map(jnp.cos, (p, x))
    tangents = lambda f: jax.jit(lambda: jax.jvp(f, (p, x), moved))()
    same(tangents(g), tangents(f))
    hessian = lambda f: jax.jit(
        lambda: jax.grad(lambda p, x: total(lambda *a: jax.grad(total(f))(*a))(p, x), 1)(p, x)
    )()
    same(hessian(g), hessian(f))
    if name == "layer":
        twice = lambda f: jax.jacfwd(jax.jacfwd(lambda x: total(f)(p, x)))(x)
        same(twice(g), jax.hessian(lambda x: total(f)(p, x))(x))
    product = lambda f: jax.jit(lambda: jax.jvp(jax.grad(total(f), (0, 1)), (p, x), moved))()
    same(product(g), product(f))


@pytest.mark.parametrize("budget", ["all", "none"])
@pytest.mark.parametrize("name", ["layer", "scan", "cond"])
def test_vmap_inside_and_outside_of_a_gradient(name, budget):
    f, lead = PROGRAMS[name]
    p, xs = params(*lead), normal(0, 3, 4, 8)
    g = remat(f, budget=budget)
    each = lambda f: jax.jit(jax.vmap(jax.grad(total(f), (0, 1)), (None, 0)))(p, xs)
    same(each(g), each(f))
    batch = lambda f: jax.grad(total(jax.vmap(f, (None, 0))), (0, 1))
    same(jax.jit(batch(g))(p, xs), batch(f)(p, xs))
    inside = lambda f: jax.jit(jax.jacrev(lambda x: jax.tree.leaves(f(p, x))[0]))(xs[0])
    same(inside(remat(f, budget=budget)), inside(f))


def test_shard_map_around_and_inside():
    p, x = params(), normal(0, 4, 8)
    expected = jax.jit(jax.value_and_grad(total(meshed), (0, 1)))(p, x)
    for budget in BUDGETS:
        found = jax.jit(jax.value_and_grad(total(remat(meshed, budget=budget)), (0, 1)))(p, x)
        same(found, expected)
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    around = lambda f: jax.jit(
        jax.grad(lambda p, x: jnp.sum(
            jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(p, x) ** 2
        ), (0, 1))
    )(p, x)  # fmt: skip
    same(around(remat(mlp, budget="none")), around(mlp))


def test_row_of_layers_in_a_mesh():
    """Layers that share a scale, each of whose gradients is a sum over devices."""
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P("d"))
    def run(ws, scale, x):
        for w in ws:
            x = jnp.tanh(x @ w) * scale
        return x

    args = [normal(i, 8, 8) for i in range(5)], normal(9, 8), normal(0, 4, 8)
    gradient = lambda f: jax.jit(jax.grad(total(f), (0, 1, 2)))(*args)
    same(gradient(remat(run, budget="none")), gradient(run))


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_long_loop_in_a_mesh(kind):
    """As a loop over runs of itself, each of which must know the mesh; one operand is a number."""
    mesh = jax.make_mesh((2,), ("d",), (kind,))

    def body(ws, scale, x):
        def step(x, w):
            with jax.named_scope("layer"):
                return jnp.sin(x @ w) * (scale + jax.lax.psum(x.mean(), "d")), None

        return jax.lax.scan(step, x, ws)[0]

    mapped = partial(jax.shard_map, in_specs=(P(), P(), P("d")), out_specs=P("d"))
    with jax.set_mesh(mesh):
        ws, x = jax.device_put((normal(1, 36, 8, 8), normal(0, 512, 8)), (P(), P("d")))
        around = lambda g: g(total(lambda ws, x: mapped(body)(ws, 1.5, x)))
        inside = lambda g: total(lambda ws, x: mapped(g(body))(ws, 1.5, x))
        run = lambda f: jax.jit(jax.grad(f, (0, 1))).lower(ws, x)
        run(around(partial(remat, budget={"layer": "none"})))
        run(inside(partial(remat, budget=0.0)))
        found = run(around(partial(remat, budget=0.0)))
        same(found.compile()(ws, x), run(around(lambda f: f)).compile()(ws, x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_attention_in_a_mesh(kind):
    """What its tiles cost is counted on one device, whatever mesh is around."""
    mesh = jax.make_mesh((2,), ("d",), (kind,))

    def body(ws, x):
        def step(x, w):
            q = (x @ w).reshape(1, -1, 2, 8)
            return flex_attention(q, q, q, mask_mod=causal()).reshape(x.shape), None

        return jax.lax.scan(step, x, ws)[0]

    f = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    with jax.set_mesh(mesh):
        args = jax.device_put((normal(1, 3, 16, 16), normal(0, 64, 16)), (P(), P("d")))
        told = remat.report(f, budget="none")(*args)
    assert "flex_attention" in {v.what for v in told.recomputed}


def test_collectives_run_once():
    """A shard_map, or a loop in one, whose body has some is not repeated as a whole."""
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))

    def step(x, w):
        part = jnp.tanh(jax.lax.pcast(x, "d", to="varying") @ w) @ w.T
        return x + jax.lax.psum(part, "d"), None

    body = lambda x, w: jax.lax.scan(step, x, w)[0]
    f = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P())
    args = normal(0, 4, 8), normal(1, 3, 32, 8)
    count = lambda f: str(jax.make_jaxpr(jax.grad(total(f), (0, 1)))(*args)).count("psum")
    assert count(remat(f, budget="none")) == count(remat(f))
    again = remat.report(f, budget="none")(*args).recomputed
    assert "shard_map" not in {v.what for v in again}


def test_transpose_of_a_linear_function():
    w, x = normal(1, 8, 4), normal(0, 3, 8)
    (found,) = jax.linear_transpose(remat(lambda x: 2 * x @ w), x)(jnp.ones((3, 4)))
    same(found, jnp.ones((3, 4)) @ (2 * w).T)


def test_checkpoint_around_it_and_a_scan_over_it():
    p, x = params(5), normal(0, 4, 8)
    f = lambda layer: total(lambda p, x: jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0])
    expected = jax.grad(f(mlp), (0, 1))(p, x)
    for layer in (remat(mlp, budget="none"), jax.checkpoint(remat(mlp)), remat(jax.jit(mlp))):
        same(jax.jit(jax.grad(f(layer), (0, 1)))(p, x), expected)


def test_arguments_of_all_kinds():
    """Integers, keys, what is no array, aux, arguments that are not differentiated, closures."""
    w, scale = normal(1, 8, 8), normal(2)

    def f(tree, n, key, mode, *, flip=False):
        assert mode == "sum"
        assert flip is True
        x, (ids, none) = tree["x"], tree["rest"]
        assert none is None
        noise = jax.random.normal(key, x.shape)
        out = jnp.sin(x @ w + noise)[ids] * n * scale
        return jnp.sum(out), {"ids": ids, "out": out}

    tree = {"x": normal(0, 4, 8), "rest": (jnp.array([2, 0, 1]), None)}
    run = lambda f: jax.value_and_grad(
        lambda x: f({**tree, "x": x}, 3, jax.random.key(7), "sum", flip=True), has_aux=True
    )(tree["x"])
    same(run(remat(f, budget="none")), run(f))
    through = lambda f: jax.grad(lambda s: jnp.sum(f(lambda x: jnp.tanh(s * x) * s)(normal(0, 3))))
    same(through(remat)(0.3), through(lambda f: f)(0.3))


@pytest.mark.parametrize("budget", ["all", "none", 0, 10**15, 0.0, 1.0])
def test_functions_that_need_nothing(budget):
    f = remat(lambda x: (3 * x, x, jnp.zeros(2)), budget=budget)
    x = normal(0, 3)
    same(jax.jacrev(lambda x: f(x)[0])(x), 3 * jnp.eye(3))
    same(f(x), (3 * x, x, jnp.zeros(2)))
    constant = remat(lambda x: jnp.ones(3), budget=budget)
    same(jax.grad(lambda x: constant(x).sum())(x), jnp.zeros(3))


def test_cotangents_of_some_results():
    f = lambda p, x: (mlp(p, x), jnp.sin(x), x.argmax(), jax.lax.stop_gradient(x))
    p, x = params(), normal(0, 4, 8)
    for some in (lambda o: o[0].sum(), lambda o: o[1].sum(), lambda o: o[3].sum() + o[2]):
        run = lambda f: jax.grad(lambda p, x: 1.0 * some(f(p, x)), (0, 1))(p, x)  # noqa: B023
        same(run(remat(f, budget="none")), run(f))


def test_jacobian_of_a_loop_that_runs_forward_only():
    f = lambda x: jax.lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)
    )
    for budget in ("all", "none", 0.0, 1000):
        again = lambda x: remat(f, budget=budget)(x)[1]  # noqa: B023
        same(jax.jacfwd(again)(0.3), jax.jacfwd(lambda x: f(x)[1])(0.3))
        with pytest.raises(ValueError, match=r"[Rr]everse-mode differentiation does not work"):
            jax.grad(again)(0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budget=-1), r"`budget=-1`: it may be bytes"),
        (dict(budget="some"), r"`budget='some'`: it may be"),
        (dict(budget=1.5), r"`budget=1.5`: it may be"),
        (dict(budget=True), r"`budget=True`: it may be"),
        (dict(again=("gemm",)), r"`again` may name 'products', .*; found 'gemm'"),
        (dict(budget={"head": "none"}), r"`budget` names 'head'; the program has the scopes none"),
        (dict(budget={}), r"`budget={}`: a dict has a budget for each.*; found no name\. For all"),
        (dict(budget={3: "all"}), r"`budget={3: 'all'}`: .* which are strings; found 3\."),
        (dict(budget={"head": 2.0}), r"`budget\['head'\]=2.0`: it may be bytes .* \"none\"\.$"),
        (
            dict(offload=[3, ["h"]]),
            r"`offload=\[3, \['h'\]\]`: it is of names, .*; found 3, \['h'\]",
        ),
        (dict(budget=float("nan")), r"`budget=nan`: it may be"),
        (dict(offload=("h",)), r"`offload` names 'h'; the program has no names: mark what"),
        (
            dict(offload="hidden"),
            r"`offload='hidden'`: it is a collection, `offload=\('hidden',\)`",
        ),
        (dict(again="products"), r"`again='products'`: it is a collection"),
    ],
    ids=[
        *("negative", "word", "above one", "bool", "kind", "scope"),
        *("no scope", "a number for a scope", "above one for a scope", "numbers to offload"),
        *("nan", "name"),
        *("a word to offload", "a word to repeat"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        remat(jnp.sin, **options)(1.0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", [remat, remat.report])
def test_what_is_no_function(call):
    with pytest.raises(ValueError, match=r"`remat` takes a function first; found 3\."):
        call(3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("argnums", [1.5, "0", (0, None)])
def test_argnums_that_are_no_numbers(argnums):
    told = remat.report(mlp, argnums=argnums)
    with pytest.raises(ValueError, match=r"`argnums=.*`: it is the number of a positional argum"):
        told(params(), normal(0, 4, 8))


def test_argnums_of_which_nothing_can_be_differentiated():
    told = remat.report(lambda i, w: w[i].sum(), argnums=0)
    with pytest.raises(ValueError, match=r"`argnums=0` names no array of floats; .* int\d+\[3\]"):
        told(jnp.arange(3), jnp.ones(3))


def test_mutable_arrays_are_refused_with_their_line():
    def f(x):
        ref = jax.new_ref(2 * x)
        ref[...] = jnp.sin(ref[...])
        return ref[...]

    with pytest.raises(ValueError, match=r"mutable arrays.*: .*test_remat.py:\d+ \(.*f\)"):
        remat(f)(1.0)
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(ValueError, match=r"mutable arrays.*: \[0\]\['r'\]\. Call"):
        remat(lambda tree: tree["r"][...])({"r": ref})
    with pytest.raises(ValueError, match=r"mutable arrays.*: closed over: Ref"):
        remat(lambda x: ref[...] * x)(2.0)


def test_budgets_may_be_numbers_of_numpy():
    f, x = lambda x: jnp.sum(jnp.sin(x) ** 2), normal(0, 4)
    for budget in (np.float32(0.5), np.float64(0.5), np.int64(10**6)):
        same(jax.grad(remat(f, budget=budget))(x), jax.grad(f)(x))
