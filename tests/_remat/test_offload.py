"""Values that the host keeps for the backward pass, wherever they get their name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from xform import remat
from xform._hlo import compile_for
from xform.jaxpr import trace, walk

S = jax.ShapeDtypeStruct
LAYERS = 4


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape) / 4


@jax.custom_vjp
def attend(x):
    return jnp.tanh(x @ x)


def _forward(x):
    out = checkpoint_name(jnp.tanh(x @ x), "out")
    return out, (x, out)


def _backward(residuals, ct):
    x, out = residuals
    g = ct * (1 - out * out)
    return (g @ x.T + x.T @ g,)


attend.defvjp(_forward, _backward)


def layer(x, w):
    return x + attend(jnp.sin(x @ w))


def unrolled(ws, x, layer=layer):
    for w in ws:
        x = layer(x, w)
    return (x**2).sum()


def scanned(ws, x, layer=layer):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).sum()


def checkpointed(ws, x):
    return scanned(ws, x, jax.checkpoint(layer))


def branched(ws, x):
    f, g = (lambda x, w=w: layer(x, w) for w in ws[:2])
    return (jax.lax.cond(x[0, 0] > 0, f, g, x) ** 2).sum()


def in_a_mesh(ws, x):
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    own = lambda ws, x: jax.lax.psum(scanned(ws, x), "dp")
    return jax.shard_map(own, mesh=mesh, in_specs=(jax.P(), jax.P("dp")), out_specs=jax.P())(ws, x)


@pytest.mark.parametrize("remat3", [False, True], ids=["remat", "remat3"])
@pytest.mark.parametrize("f", [unrolled, scanned, checkpointed, branched, in_a_mesh])
def test_names_in_the_forward_rule_of_a_custom_vjp(f, remat3):
    """See https://github.com/jax-ml/jax/issues/40309."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", remat3)
    try:
        args = normal(LAYERS, 16, 16), normal(16, 16)
        told = remat.report(f, budget="none", offload=("out",))(*args)
        found = jax.grad(remat(f, budget="none", offload=("out",)), (0, 1))(*args)
        expected = jax.grad(f, (0, 1))(*args)
    finally:
        jax.config.update("jax_remat3", before)
    assert {v.what for v in told.saved if v.on_host} == {"tanh"}
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def step(x, w):
    x = checkpoint_name(x, "input")
    return x + jnp.sin(jnp.tanh(x @ w) @ w)


def inputs_unrolled(ws, x):
    return unrolled(ws, x, step)


def inputs_scanned(ws, x):
    return scanned(ws, x, step)


def results_unrolled(ws, x):
    return unrolled(ws, x, lambda x, w: checkpoint_name(jnp.tanh(x @ w), "input"))


@pytest.mark.parametrize("budget", ["none", 0.5, "all"])
@pytest.mark.parametrize("f", [inputs_unrolled, inputs_scanned, results_unrolled])
def test_what_a_layer_hands_to_the_next_leaves_the_device(f, budget):
    """It is what layers that run again save, and so what users name first."""
    args = _, x = normal(LAYERS, 16, 16), normal(16, 16)
    told = remat.report(f, budget=budget, offload=("input",))(*args)
    on_host = sum(v.times for v in told.saved if v.on_host)
    assert on_host in (LAYERS - 1, LAYERS)  # the argument of the first one stays where it is
    if budget == "none":  # but for the result of a loop, which the sum's derivative reads
        assert told.saved_bytes == (4 * x.size if f is inputs_scanned else 0)
    found = jax.grad(remat(f, budget=budget, offload=("input",)), (0, 1))
    kinds = [s.eqn.params["devices"][0] for s in walk(trace(found, *args)) if _moves(s.eqn)]
    once = 1 if f is inputs_scanned else on_host
    assert kinds.count(jax.memory.Space.Host) == once  # and never again in the backward pass
    for a, b in zip(found(*args), jax.grad(f, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _moves(eqn):
    return eqn.primitive.name == "device_put"


@pytest.mark.parametrize("f", [inputs_unrolled, inputs_scanned, branched, in_a_mesh])
def test_backward_passes_that_fetch_values_are_differentiated_in_both_directions(f):
    """Cotangents go where their values were, which JAX must be told of a move to the host."""
    args = normal(3, 8, 8), normal(8, 8)
    name = "out" if f in (branched, in_a_mesh) else "input"
    planned = remat(f, budget="none", offload=(name,))
    gradient = lambda f: lambda *args: jax.tree.map(jnp.sin, jax.grad(f, (0, 1))(*args))
    square = lambda f: lambda *args: sum(jnp.sum(g**2) for g in gradient(f)(*args))
    back = lambda f: jax.jit(jax.grad(square(f), (0, 1)))(*args)
    forth = lambda f: jax.jit(lambda *args: jax.jvp(gradient(f), args, args)[1])(*args)
    for run in (back, forth):
        for a, b in zip(run(planned), run(f), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def twice(x, w):
    return checkpoint_name(checkpoint_name(x + jnp.tanh(jnp.sin(x @ w) @ w), "a"), "b")


def inputs_twice(x, w):
    x = checkpoint_name(checkpoint_name(x, "a"), "b")
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b")], ids=" ".join)
@pytest.mark.parametrize(
    ("f", "layer", "hosted"),
    [
        (unrolled, twice, LAYERS),
        (unrolled, inputs_twice, LAYERS - 1),
        (scanned, inputs_twice, LAYERS),
    ],
)
def test_a_value_of_two_names_leaves_by_either_and_once(f, layer, hosted, names):
    args = normal(LAYERS, 16, 16), normal(16, 16)
    f = partial(f, layer=layer)
    told = remat.report(f, budget="none", offload=names)(*args)
    assert sum(v.times for v in told.saved if v.on_host) == hosted
    found = jax.grad(remat(f, budget="none", offload=names), (0, 1))(*args)
    for a, b in zip(found, jax.grad(f, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_offloaded_values_wait_in_the_memory_of_the_host():
    def f(w, x):
        h = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return (jnp.sin(h @ w) ** 2).sum()

    w, x = (
        jax.random.normal(jax.random.key(i), s) * 0.1 for i, s in enumerate([(64, 64), (256, 64)])
    )
    told = remat.report(f, offload=("hidden",))(w, x)
    assert [(v.on_host, v.what) for v in told.saved if v.on_host] == [(True, "tanh")]
    assert told.saved_bytes < remat.report(f)(w, x).saved_bytes
    found = jax.grad(remat(f, offload=("hidden",)), (0, 1))
    kinds = [s.eqn.params["devices"][0] for s in walk(trace(found, w, x)) if _moves(s.eqn)]
    assert kinds.count(jax.memory.Space.Host) == 1
    for a, b in zip(found(w, x), jax.grad(f, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_offloaded_residuals_of_a_scan_leave_the_device():
    """See https://github.com/jax-ml/jax/issues/23869."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")

    def f(w, x):
        layer = lambda x, w: (checkpoint_name(jnp.tanh(x @ w), "hidden"), None)
        return jax.lax.scan(layer, x, w)[0].sum()

    args, stack = (S((8, 512, 512), jnp.float32), S((512, 512), jnp.float32)), 8 * 4 * 512 * 512
    found = [
        compile_for("H200", jax.grad(remat(f, offload=names), (0, 1)), *args).memory_analysis()
        for names in ((), ("hidden",))
    ]
    assert [m.host_temp_size_in_bytes for m in found] == [0, stack]
    assert found[0].temp_size_in_bytes - found[1].temp_size_in_bytes >= 0.8 * stack


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["none", 0.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("f", [inputs_unrolled, inputs_scanned, results_unrolled])
def test_an_h200_keeps_only_what_is_said(f, dtype, budget):
    """XLA would put off products while it waits for the host, and keep what they read."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
    args = S((8, 512, 512), dtype), S((8192, 512), dtype)
    planned = remat(f, budget=budget, offload=("input",), device="H200")
    found = compile_for("H200", jax.grad(planned, (0, 1)), *args).memory_analysis()
    told = remat.report(f, budget=budget, offload=("input",), device="H200")(*args)
    assert found.host_temp_size_in_bytes == sum(v.bytes for v in told.saved if v.on_host)
    assert found.temp_size_in_bytes <= 1.05 * told.peak
