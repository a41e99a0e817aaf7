"""Which equation loses the digits: introduced where they are lost, passed on after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import Policy, Products, precision
from xform.numerics import compare
from xform.sharding import make_mesh


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_operation(report):
    """Of each operation the row with the largest error of its own."""
    return {row.operation: row for row in reversed(report.worst)}


def test_the_guilty_equation_is_apart_from_those_that_pass_it_on():
    def f(x):
        y = x + 1000.0  # in float16: half a unit of 1000 is 0.25
        z = y - 1000.0  # exact, and the error is all that is left of small numbers
        return jnp.tanh(z)

    x = random(64).astype(jnp.float16) * jnp.float16(0.1)
    report = compare(f)(x)
    rows = by_operation(report)
    # All become 1000, the nearest of what lies 0.5 apart.
    size = np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))
    assert rows["add"].introduced == pytest.approx(size / 1000, rel=0.01)
    assert rows["add"].passed_on == 0
    assert rows["sub"].introduced < 1e-6
    assert rows["sub"].passed_on > 0.5
    assert rows["tanh"].introduced < 1e-3 < rows["tanh"].passed_on
    assert report.worst[0].operation in ("add", "tanh")
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in rows["add"].line
    want = np.tanh(np.asarray(x, np.float64))
    got = np.asarray(f(x), np.float64)
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert report.outputs[0] == pytest.approx(error, rel=1e-3)


def test_a_policy_of_precision():
    f = lambda w, x: jnp.exp(x @ w)
    report = compare(f, "bf16")(random(32, 8) * 0.3, random(4, 32, seed=1))
    rows = by_operation(report)
    assert 2**-10 < rows["convert_element_type"].introduced < 2**-8
    assert 2**-11 < rows["dot_general"].introduced < 2**-8
    assert rows["exp"].introduced < 1e-6 < rows["exp"].passed_on
    assert rows["dot_general"].line.startswith(f"{__file__}:{f.__code__.co_firstlineno}")
    eight = compare(f, Policy(products=Products("e4m3", None)))(random(32, 8), random(4, 32))
    assert eight.outputs[0] > 3 * report.outputs[0]


def test_the_turn_of_a_loop_with_the_largest_error():
    step = lambda c, x: (c * 0 + (x + 1024.0) - 1024.0, None)
    f = lambda xs: lax.scan(step, jnp.float16(0), xs)[0]
    xs = jnp.full(9, 1.0, jnp.float16).at[6].set(0.3)
    row = max((r for r in compare(f)(xs).rows if r.operation == "add"), key=lambda r: r.introduced)
    assert row.iterations == (("scan", 6),)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 1.1), (0, x))[1],
        lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        jax.checkpoint(lambda x: jnp.sin(x) * 2),
        jax.grad(lambda x: jnp.sum(jax.nn.relu(x * 1.1) ** 3)),
        jax.vmap(lambda x: jnp.cumsum(jnp.stack([x, x * 1.1]))[1]),
    ],
    ids=["while", "cond", "remat", "grad", "vmap"],
)
def test_it_runs_everywhere(f):
    x = random(16)
    report = compare(f, "bf16")(x)
    low, high = (np.asarray(g(x)).astype(np.float64) for g in (precision(f, "bf16"), f))
    error = np.sqrt(np.mean((low - high) ** 2) / np.mean(high**2))
    assert report.outputs[0] == pytest.approx(error, rel=0.01, abs=1e-7)
    half = compare(f)(x.astype(jnp.bfloat16))
    assert 2**-12 < half.outputs[0] < 2**-5


def test_each_device_has_its_own():
    mesh = make_mesh(dp=8)
    f = jax.shard_map(lambda x: (x + 1024) - 1024, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    x = np.ones(8, np.float16)
    x[5] = 0.3
    x = jax.device_put(x, jax.NamedSharding(mesh, P("dp")))
    report = compare(f)(x)
    bad = [row.device for row in report.rows if row.operation == "add" and row.introduced > 0]
    assert bad == [(("dp", 5),)]


def test_float64_is_asked_for():
    f = lambda x: (x + 1e6) - 1e6
    with pytest.raises(ValueError, match=r"inside of `jax.enable_x64\(True\)`"):
        compare(f, high="float64")
    with jax.enable_x64(True):
        report = compare(f, high="float64")(np.float32(0.1))
    assert report.outputs[0] == pytest.approx(
        abs(float(np.float32(0.1) + np.float32(1e6)) - 1e6 - 0.1) / 0.1, rel=1e-2
    )
    with pytest.raises(ValueError, match="`high` is bfloat16"):
        compare(f, high="bfloat16")
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(lambda x: compare(f)(x).outputs)(1.0)
