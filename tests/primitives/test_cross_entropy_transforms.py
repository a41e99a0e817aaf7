"""Linear cross entropy under every transform of JAX, by the same transform of the dense oracle."""

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.oracle import once
from xform import linear_cross_entropy
from xform.jaxpr import trace, walk
from xform.lowering._loss_fn import Chunks
from xform.sharding.mesh import make_mesh, shardings

CHUNKED = partial(linear_cross_entropy, chunks=Chunks(by_token=(4, 128), by_entry=(8, 128)))
DENSE = partial(linear_cross_entropy, implementation="reference")
OPTIONS: dict[str, Any] = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
B, T, D, V = 2, 5, 6, 156
P = jax.P


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem(seed=0, mapped: Mapping[str, int] = MappingProxyType({})):
    """Random operands, those that are `mapped` with a leading dimension of a size."""
    rng = np.random.default_rng(seed)
    lead = lambda name: (mapped[name],) if name in mapped else ()
    shapes = {"hidden": (B, T, D), "weight": (D, V), "bias": (V,)}
    x = {name: rng.normal(size=(*lead(name), *shape)) for name, shape in shapes.items()}
    labels = rng.integers(-1, V, size=(*lead("labels"), B, T))
    labels[..., 0, 1] = -1
    return jax.tree.map(jnp.asarray, x), jnp.asarray(labels, jnp.int32)


def loss(entropy, x, labels, **options):
    """A scalar in which every token's loss and log-sum-exp count differently."""
    options = options or OPTIONS
    both = entropy(x["hidden"], x["weight"], labels, bias=x["bias"], **options)
    return sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape)).sum() for y in both)


def assert_same(transformed, *args):
    """Asserts that `transformed(entropy)` is the same of the chunked and the dense one."""
    found, true = once(lambda *a: [transformed(f)(*a) for f in (CHUNKED, DENSE)], *args)
    assert_close(found, true)


def assert_close(found, true, rtol=1e-10):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(true), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.abs(y).max() > 1e-8, f"{name} is zero, and tests nothing"
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(), err_msg=name)


# ---- Derivatives of every order ------------------------------------------------------------------


def dot(x, y):
    return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


ORDERS = {
    "jvp": lambda f, x, dx: jax.jvp(f, (x,), (dx,)),
    "hvp": lambda f, x, dx: jax.jvp(jax.grad(f), (x,), (dx,)),
    "grad of grad": lambda f, x, dx: jax.grad(lambda x: dot(jax.grad(f)(x), dx))(x),
    "grad of hvp": lambda f, x, dx: jax.grad(
        lambda x: dot(jax.jvp(jax.grad(f), (x,), (dx,))[1], dx)
    )(x),
}


def some_slow(quick, names):
    """Parameters of which all but the `quick` are slow: each takes seconds of compilation."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some_slow(("jvp", "grad of grad"), ORDERS))
def test_derivatives_of_derivatives(name):
    (x, labels), (dx, _) = problem(), problem(seed=1)
    assert_same(lambda f: lambda x, dx: ORDERS[name](lambda x: loss(f, x, labels), x, dx), x, dx)


@pytest.mark.parametrize("name", some_slow(("weight",), ("hidden", "weight", "bias")))
def test_only_one_operand_moves(name):
    """What does not move costs nothing: frozen weights leave no tile sum, frozen states no walk."""
    x, labels = problem()
    of = lambda f: jax.grad(lambda y: loss(f, x | {name: y}, labels))
    assert_same(of, x[name])
    sites = [s.eqn for s in walk(trace(of(CHUNKED), x[name]))]
    count = lambda primitive: sum(eqn.primitive.name == primitive for eqn in sites)
    (forward,) = (eqn for eqn in sites if eqn.primitive.name == "linear_cross_entropy")
    assert (forward.params["rows"] is None) == (name != "hidden")
    assert count("loss_sum") == (name != "hidden")


# ---- vmap ----------------------------------------------------------------------------------------

BATCHED = {
    "tokens": ("hidden", "labels"),
    "labels": ("labels",),
    "weights": ("weight",),
    "bias": ("bias", "labels"),
    "everything": ("hidden", "weight", "bias", "labels"),
}


def batched(name):
    """Operands with one more dimension where they are mapped, and the axes for `vmap`."""
    x, labels = problem(mapped=dict.fromkeys(BATCHED[name], 3))
    axes = {key: 0 if key in BATCHED[name] else None for key in (*x, "labels")}
    return x, labels, ({key: axes[key] for key in x}, axes["labels"])


@pytest.mark.parametrize("name", some_slow(("tokens", "bias"), BATCHED))
def test_the_gradient_of_a_vmap_sums_what_is_shared(name):
    x, labels, axes = batched(name)
    each = lambda f: jax.vmap(partial(loss, f), axes)
    weights = jnp.array([1.0, -2.0, 3.0])
    assert_same(lambda f: jax.grad(lambda x: each(f)(x, labels) @ weights), x)


@pytest.mark.parametrize("name", some_slow(("tokens", "weights"), BATCHED))
def test_a_vmap_of_gradients_gives_one_of_each(name):
    x, labels, axes = batched(name)
    assert_same(lambda f: jax.vmap(jax.grad(partial(loss, f)), axes), x, labels)


def test_vmap_of_vmap_over_different_operands():
    x, labels = problem(mapped={"hidden": 2, "weight": 3})
    outer, inner = ({key: 0 if key == name else None for key in x} for name in ("hidden", "weight"))

    def nested(f):
        g = lambda x: loss(f, x, labels)
        g = jax.vmap(jax.vmap(g, (inner,)), (outer,), out_axes=1)
        return jax.value_and_grad(lambda x: (g(x) * jnp.arange(1.0, 7).reshape(3, 2)).sum())

    assert_same(nested, x)


# ---- Control flow --------------------------------------------------------------------------------


def test_a_scan_over_heads_with_a_checkpoint():
    """Each step sees weights of its own, and its forward pass runs again."""
    x, labels = problem(mapped={"weight": 3})

    def program(f):
        step = jax.checkpoint(lambda total, w: (total + loss(f, x | {"weight": w}, labels), None))
        return jax.value_and_grad(lambda ws: jax.lax.scan(step, 0.0, ws)[0])

    assert_same(program, x["weight"])


# ---- Devices -------------------------------------------------------------------------------------


def split_over(mesh, specs, reduce, **options):
    """Loss and gradients of `loss`-like sums on a mesh, inside `shard_map` with types checked."""

    def body(x, labels):
        def total(x):
            both = CHUNKED(x["hidden"], x["weight"], labels, bias=x["bias"], **options)
            return sum(jnp.sin(y).sum() for y in both)

        value, grads = jax.value_and_grad(total)(x)
        return jax.lax.psum(value, reduce), grads

    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))


def expected(x, labels, **options):
    def total(x):
        both = DENSE(x["hidden"], x["weight"], labels, bias=x["bias"], **options)
        return sum(jnp.sin(y).sum() for y in both)

    return once(jax.value_and_grad(total), x)


KEPT = {"chunks": None, "implementation": None, "keep_logits": True}


def test_kept_logits_under_vmap_and_two_derivatives():
    x, labels = problem(mapped={"hidden": 3})

    def program(entropy):
        def gradient(hidden, weight):
            f = lambda h, w: loss(entropy, x | {"hidden": h, "weight": w}, labels)
            return jax.grad(f, (0, 1))(hidden, weight)

        along = lambda h, w: jax.jvp(gradient, (h, w), (jnp.cos(h), jnp.sin(w)))
        return jax.vmap(along, (0, None))(x["hidden"], x["weight"])

    assert_close(*once(lambda: [program(f) for f in (partial(CHUNKED, **KEPT), DENSE)]))


@pytest.mark.parametrize(
    ("smoothing", "how"),
    [(0.1, {}), (0.1, KEPT), pytest.param(0.0, {}, marks=pytest.mark.slow)],
    ids=["smoothing", "kept logits", "plain"],
)
def test_a_vocabulary_split_over_devices(smoothing, how):
    """Tokens over dp, the vocabulary over tp: exact on every leaf, and no logits travel."""
    options = OPTIONS | {"label_smoothing": smoothing}
    x, labels = problem()
    mesh = make_mesh(dp=2, tp=3, devices=jax.devices("cpu")[:6])
    specs = {"hidden": P("dp"), "weight": P(None, "tp"), "bias": P("tp")}
    spread = split_over(mesh, specs, "dp", vocab_axis="tp", **options, **how)
    placed = jax.device_put((x, labels), shardings(mesh, (specs, P("dp"))))
    assert_close(*jax.device_get((once(spread, *placed), expected(x, labels, **options))))
    text = jax.jit(spread).lower(*placed).as_text()
    sizes = re.findall(r"tensor<([\dx]+)xf64>", "".join(re.findall(r"all_reduce.*", text)))
    assert "all_gather" not in text
    assert str(V // 3) not in "x".join(sizes).split("x")


def test_a_vocabulary_axis_that_splits_nothing_is_an_error(unchecked):
    x, labels = problem()
    mesh = make_mesh(dp=2, tp=3, devices=jax.devices("cpu")[:6])
    specs = {"hidden": P("dp"), "weight": P(), "bias": P()}
    placed = jax.device_put((x, labels), shardings(mesh, (specs, P("dp"))))
    spread = split_over(mesh, specs, ("dp", "tp"), vocab_axis="tp")
    with pytest.raises(ValueError, match="`weight` does not vary over it; needed is a call inside"):
        jax.eval_shape(spread, *placed)


def test_tokens_and_vocabulary_split_over_one_axis_are_an_error(unchecked):
    x, labels = problem()
    mesh = make_mesh(tp=2, devices=jax.devices("cpu")[:2])
    specs = {"hidden": P("tp"), "weight": P(None, "tp"), "bias": P("tp")}

    def body(x, labels):
        return CHUNKED(x["hidden"], x["weight"], labels, bias=x["bias"], vocab_axis="tp")

    spread = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("tp")), out_specs=(P("tp"),) * 2)
    placed = jax.device_put((x, labels), shardings(mesh, (specs, P("tp"))))
    with pytest.raises(ValueError, match="`labels` vary over 'tp', the `vocab_axis`; needed are"):
        jax.eval_shape(spread, *placed)


def collectives(compiled) -> set[str]:
    """What a compiled program does between devices."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(names, compiled.as_text()))


EXPLICIT = {
    "tokens": ({"hidden": P("dp", "tp"), "weight": P(), "bias": P()}, P("dp", "tp")),
    "vocabulary": ({"hidden": P("dp"), "weight": P(None, "tp"), "bias": P("tp")}, P("dp")),
}


def on_explicit_axes(specs, label_spec):
    """`loss` of operands that explicit axes of a mesh split by type, and its gradients."""
    x, labels = problem()
    x["hidden"], labels = x["hidden"][:, :4], labels[:, :4]
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Explicit,) * 2, devices=devices)
    place = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))
    x = {name: place(y, specs[name]) for name, y in x.items()}

    def total(x, labels):
        both = CHUNKED(x["hidden"], x["weight"], labels, bias=x["bias"], **OPTIONS)
        return sum(jnp.sin(y).sum() for y in both)

    return mesh, jax.value_and_grad(total), x, place(labels, label_spec)


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes_split_tokens_or_the_vocabulary(name):
    specs, label_spec = EXPLICIT[name]
    mesh, f, x, labels = on_explicit_axes(specs, label_spec)
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(x, labels).compile()
        value, grads = compiled(x, labels)
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(x[name].sharding, grad.ndim), name
    x, labels = jax.device_get((x, labels))
    assert_close(jax.device_get((value, grads)), expected(x, labels, **OPTIONS))
    assert not collectives(compiled) & {"all-gather", "all-to-all", "collective-permute"}


def test_explicit_axes_split_a_dimension_of_vmap():
    """Each device has instances of its own; the gradient of what they share is summed."""
    x, labels = problem(mapped={"hidden": 4, "labels": 4})
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    place = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))
    axes = {"hidden": 0, "weight": None, "bias": None}, 0

    def program(f, x, labels):
        total = lambda x: jnp.sum(jax.vmap(partial(loss, f), axes)(x, labels))
        return jax.jvp(jax.grad(total), (x,), (x,))

    true = once(partial(program, DENSE), x, labels)
    specs = {"hidden": P("dp"), "weight": P(), "bias": P()}
    with jax.set_mesh(mesh):
        placed = {n: place(y, specs[n]) for n, y in x.items()}, place(labels, P("dp"))
        compiled = jax.jit(partial(program, CHUNKED)).lower(*placed).compile()
        found = compiled(*placed)
    assert found[0]["hidden"].sharding.is_equivalent_to(placed[0]["hidden"].sharding, 4)
    assert collectives(compiled) == {"all-reduce"}
    assert_close(jax.device_get(found), true)


def test_a_split_dimension_of_vmap_around_split_tokens_is_an_error(unchecked):
    x, labels = problem(mapped={"hidden": 4, "labels": 4})
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Explicit,) * 2, devices=devices)
    place = lambda y: jax.device_put(y, jax.NamedSharding(mesh, P("dp", "tp")))
    entropy = jax.vmap(lambda h, y: CHUNKED(h, x["weight"], y))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="Call `vmap` inside"):
        jax.eval_shape(entropy, place(x["hidden"]), place(labels))


UNSUPPORTED = {
    "`hidden` is split over .* must be whole on every device": {"hidden": P(None, None, "tp")},
    "`weight` over .*: the dimension that they share": {"weight": P("tp")},
    "one axis is supported": {"weight": P(None, ("dp", "tp"))},
    "tokens and vocabulary are split over the same": {"weight": P(None, "dp"), "bias": P("dp")},
    "`bias` is split over .* and entries of `weight` over": {"bias": P("tp")},
}


@pytest.mark.parametrize("match", UNSUPPORTED)
def test_a_split_that_is_not_supported_is_an_error(match, unchecked):
    whole = {"hidden": P("dp"), "weight": P(), "bias": P()}
    _, f, x, labels = on_explicit_axes(whole | UNSUPPORTED[match], P("dp"))
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(f, x, labels)


def on_automatic_axes(specs, label_spec):
    """Loss and gradients under plain `jit`, compiled for operands that are split so."""
    x, labels = problem()
    x["hidden"], labels = x["hidden"][:, :4], labels[:, :4]
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    place = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))
    x, labels = {n: place(y, specs[n]) for n, y in x.items()}, place(labels, label_spec)

    def total(x):
        both = CHUNKED(x["hidden"], x["weight"], labels, bias=x["bias"], **OPTIONS)
        return sum(jnp.sin(y).sum() for y in both)

    return jax.jit(jax.value_and_grad(total)).lower(x).compile(), x, labels


@pytest.mark.parametrize("weight", some_slow((P(),), (P(), P(None, "cp"))))
def test_automatic_axes_split_tokens(weight):
    """Each device walks its own tokens; only weights that are split are gathered, for all."""
    tokens = P("dp", "cp") if weight == P() else P("dp")
    specs = {"hidden": tokens, "weight": weight, "bias": P()}
    compiled, x, labels = on_automatic_axes(specs, tokens)
    value, grads = compiled(x)
    assert grads["hidden"].sharding.is_equivalent_to(x["hidden"].sharding, 3)
    assert collectives(compiled) == {"all-reduce"} | (set() if weight == P() else {"all-gather"})
    x, labels = jax.device_get((x, labels))
    assert_close(jax.device_get((value, grads)), expected(x, labels, **OPTIONS))


def test_an_ignored_token_is_no_part_of_a_second_derivative():
    """Nor is its tangent, which is NaN where the token is."""
    labels = jnp.arange(16).at[3].set(-1)
    h, w = jnp.ones((16, 8)).at[3].set(jnp.nan), jnp.eye(8, 40)

    def moved(implementation):
        loss = lambda h, w: linear_cross_entropy(h, w, labels, implementation=implementation)[0]
        both = jax.grad(lambda h, w: loss(h, w).sum(), (0, 1))
        return jax.jvp(both, (h, w), (h, w))[1]

    (of_h, of_w), (true_h, true_w) = moved(None), moved("reference")
    np.testing.assert_allclose(of_w, true_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_h.at[3].set(0), true_h.at[3].set(0), rtol=1e-5, atol=1e-6)
