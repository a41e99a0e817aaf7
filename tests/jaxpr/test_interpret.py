"""Programs on values of another kind."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.jaxpr import carried, eqn_rule, interpret, trace

X = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`."""

    low: float
    high: float


def lift(x):
    return Interval(float(x), float(x))


def product(a, b, **_):
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(ends), max(ends))


def scan(*args, jaxpr, length, reverse, **_):
    """Of a carry alone: the body, `length` times."""
    assert not reverse
    for _ in range(length):
        args = interpret(jaxpr, INTERVALS, lift=lift)(*args)
    return list(args)


INTERVALS = {
    "add": lambda a, b, **_: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b, **_: Interval(a.low - b.high, a.high - b.low),
    "mul": product,
    "exp": lambda a, **_: Interval(math.exp(a.low), math.exp(a.high)),
    "scan": scan,
}


def test_a_users_interval_arithmetic():
    f = lambda x, y: x * y - jnp.exp(x) + 1.0
    (out,) = interpret(trace(f, 1.0, 1.0), INTERVALS, lift=lift)(Interval(-1, 2), Interval(0, 3))
    assert out == Interval(-3 - math.exp(2) + 1, 6 - math.exp(-1) + 1)


LOOPS = {
    "scan of a carry": (lambda w, x: jax.lax.scan(lambda c, _: (c * w, None), x, length=3), (1, 1)),
    "scan": (lambda w, x: jax.lax.scan(lambda c, y: (c * w, c + y), x, jnp.ones(3)), (1, 1)),
    "scan of two": (
        lambda w, x: jax.lax.scan(lambda c, y: ((c[0] * w, c[1] * y), y), (x, x), jnp.ones(3)),
        (1, 2),
    ),
    "map": (lambda w, x: jax.lax.map(lambda y: w * y + x, jnp.ones(3)), (2, 0)),
    "while": (lambda w, x: jax.lax.while_loop(lambda c: c < x, lambda c: c * w, x), (2, 1)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_operands_of_a_loop_divide(name):
    f, divided = LOOPS[name]
    eqn = trace(f, 1.5, 2.5).eqns[-1]
    assert eqn.primitive.name in ("scan", "while")
    assert carried(eqn) == divided


def test_what_is_no_loop_carries_nothing():
    (eqn,) = trace(jnp.sin, 1.0).eqns
    with pytest.raises(ValueError, match=r"`sin` \(at .*\) is neither"):
        carried(eqn)


def test_rule_of_a_loop_interprets_its_body():
    program = trace(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x * 2.0, x), 1.0)
    rules = INTERVALS | {"scan": lambda i, x, **p: [i, *scan(x, **p | {"jaxpr": BODY})]}
    assert interpret(program, rules, lift=lift)(Interval(-1, 3)) == [Interval(-16, 48)]


BODY = trace(lambda x: x * 2.0, 1.0)


@jax.custom_jvp
def with_jvp(x):
    return jnp.exp(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.exp(x)


with_vjp.defvjp(lambda x: (with_vjp(x), ()), lambda residuals, g: (g,))


@pytest.mark.parametrize(
    "f", [jax.jit(jnp.exp), jax.jit(jax.jit(jnp.exp)), jax.checkpoint(jnp.exp), with_jvp, with_vjp]
)
def test_calls_run_their_body(f):
    assert interpret(trace(f, 1.0), INTERVALS)(Interval(0, 1)) == [Interval(1, math.e)]


def test_call_has_a_rule_by_its_name():
    program = trace(lambda x: x // 3 + jnp.clip(x, 0, 5), 1)
    rules = {
        ("jit", "floor_divide"): lambda a, b, **_: [Interval(a.low // b.low, a.high // b.high)],
        ("jit", "clip"): lambda a, low, high, **_: Interval(
            max(a.low, low.low), min(a.high, high.high)
        ),
        "add": INTERVALS["add"],
    }
    assert interpret(program, rules, lift=lift)(Interval(-1, 9)) == [Interval(-1, 8)]


def test_missing_rule_names_the_primitive_the_line_and_the_remedy():
    def f(x):
        return jax.lax.add(jnp.arctan2(x, 2.0), x)

    with pytest.raises(NotImplementedError) as error:
        interpret(trace(f, 1.0), INTERVALS, lift=lift)(Interval(0, 1))
    line = f.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"no rule for the primitive `atan2` (at {__file__}:{line} ({f.__qualname__})). "
        "Register one:\n\n"
        "    def atan2_rule(x0, x1, **params):\n"
        "        return ...  # the result\n"
        '    rules["atan2"] = atan2_rule\n'
    )


def test_default_takes_the_equation():
    seen = []

    def unknown(eqn, *args):
        seen.append((eqn.primitive.name, args))
        return Interval(-math.inf, math.inf)

    f = lambda x: jnp.tanh(x) + 1.0
    (out,) = interpret(trace(f, 1.0), INTERVALS, default=unknown, lift=lift)(Interval(0, 1))
    assert out == Interval(-math.inf, math.inf)
    assert seen == [("tanh", (Interval(0, 1),))]


def test_rule_may_take_the_equation():
    sizes = {"sin": eqn_rule(lambda eqn, n: n + eqn.outvars[0].aval.size)}
    assert interpret(trace(jnp.sin, X), sizes)(0) == [8]


def test_constants_are_lifted():
    table = np.random.default_rng(1).normal(size=8).astype(np.float32)
    program = trace(lambda x: x + jnp.asarray(table), X)
    (out,) = interpret(program, {"add": lambda a, b, **_: a | b}, lift=lambda c: {c.shape})({"x"})
    assert out == {"x", (8,)}


class Dual(NamedTuple):
    """A number and its tangent; a pytree to JAX, one value here."""

    x: jax.Array
    dx: jax.Array

    @property
    def shape(self):
        return self.x.shape

    @property
    def dtype(self):
        return self.x.dtype


def constant(x):
    return Dual(jnp.asarray(x), jnp.zeros_like(x))


DUALS = {
    "sin": lambda a, **_: Dual(jnp.sin(a.x), jnp.cos(a.x) * a.dx),
    "mul": lambda a, b, **_: Dual(a.x * b.x, a.dx * b.x + a.x * b.dx),
    "cos": lambda a, **_: Dual(jnp.cos(a.x), -jnp.sin(a.x) * a.dx),
}


def test_a_function_of_pytrees_takes_values_with_shape_and_dtype():
    def f(params, *, x):
        return {"y": jnp.sin(params["w"] * x) * 2.0}

    out = jax.jit(interpret(f, DUALS, lift=constant))({"w": Dual(X, jnp.ones(8))}, x=constant(X))
    want = jax.jvp(lambda w: f({"w": w}, x=X)["y"], (X,), (jnp.ones(8),))
    np.testing.assert_allclose(out["y"].x, want[0], rtol=1e-6)
    np.testing.assert_allclose(out["y"].dx, want[1], rtol=1e-6)


def test_results_must_be_as_many_as_the_equations():
    program = trace(lambda x: jax.lax.scan(lambda c, x: (c, x), x[0], x), X)
    rules = {"scan": lambda *xs, **_: ["a", "b", "c"]}
    with pytest.raises(ValueError, match=r"rule of `scan` returned 3 results where the equation"):
        interpret(program, rules, default=lambda eqn, *xs: "d")("x")
