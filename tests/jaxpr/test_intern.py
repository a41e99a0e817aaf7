"""Equal programs are one object; unequal ones never are."""

import functools
import gc
import math
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from xform._compat import apply_primitive
from xform.jaxpr import inline, intern, trace

X = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)


def same(f, g, x=X, y=None):
    """Whether two functions, traced afresh, are one program."""
    again = lambda f, x: trace(lambda x: f(x), x)
    a, b = again(f, x), again(g, x if y is None else y)
    assert a is not b
    return intern(a) is intern(b)


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), ()), lambda residuals, g: (g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_static(n, x):
    return jnp.sin(x)


with_static.defvjp(lambda n, x: (with_static(n, x), ()), lambda n, residuals, g: (n * g,))


def scanned(x):
    return jax.lax.scan(lambda c, x: (jnp.sin(c) * x, c), x[0], x)


def looped(x):
    return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1.0, x)


NAMES = ["silu", "relu", "gelu", "softmax", "logsumexp", "softplus", "leaky_relu", "elu", "selu"]
EQUAL = {name: getattr(jax.nn, name) for name in NAMES} | {
    "with_vjp": with_vjp,
    "with_static": lambda x: with_static(3, x),
    "with_static_array": lambda x: with_static(np.arange(8.0), x),
    "scan": scanned,
    "while": looped,
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "remat": jax.checkpoint(jax.nn.relu),
    "remat_policy": jax.checkpoint(
        jnp.sin, policy=jax.checkpoint_policies.save_only_these_names("a", "b")
    ),
    "grad_of_scan": jax.grad(lambda x: scanned(x)[0]),
    "nan": lambda x: jnp.where(x > 0, x, math.nan),
    "gather": lambda x: x[jnp.argsort(x)],
    "norm": jnp.linalg.norm,
    "accuracy": lambda x: jax.lax.tanh(x, accuracy=jax.lax.Tolerance(rtol=1e-3)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_code_is_one_program(name):
    assert same(EQUAL[name], EQUAL[name])


def test_fresh_closures_are_one_program():
    def scale(by):
        return lambda x: jax.nn.gelu(x * by)

    assert same(scale(2.0), scale(2.0))
    assert not same(scale(2.0), scale(3.0))


def declared(rule):
    f = jax.custom_jvp(lambda x: jnp.sin(x))
    f.defjvp(rule)
    return f


def policy(*names):
    return jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names(*names))


zero, minus_zero = np.float32(0.0), np.float32(-0.0)
DIFFERENT = {
    "primitive": (jnp.sin, jnp.cos),
    "wiring": (lambda x: x - x * x, lambda x: x * x - x),
    "which_operand": (lambda x: x[0] - x[1] * x[0], lambda x: x[0] - x[1] * x[1]),
    "which_result": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "literal": (lambda x: x * 2.0, lambda x: x * 3.0),
    "literal_bits": (lambda x: x * 0.1, lambda x: x * (0.1 + 1e-8)),
    "signed_zero": (lambda x: x * zero, lambda x: x * minus_zero),
    "param": (lambda x: jnp.sum(x.reshape(2, 4), 0), lambda x: jnp.sum(x.reshape(4, 2), 1)),
    "axis": (lambda x: jax.lax.cumsum(x), lambda x: jax.lax.cumsum(x, reverse=True)),
    "dtype": (lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16)),
    "precision": (lambda x: x @ x, functools.partial(lambda x: jnp.dot(x, x, precision="highest"))),
    "scan_length": (
        lambda x: jax.lax.scan(lambda c, _: (c * 2.0, None), x, length=3),
        lambda x: jax.lax.scan(lambda c, _: (c * 2.0, None), x, length=4),
    ),
    "branch": (
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ),
    "jvp_rule": (
        declared(lambda xs, ts: (jnp.sin(xs[0]), ts[0])),
        declared(lambda xs, ts: (jnp.sin(xs[0]), 2.0 * ts[0])),
    ),
    "static_argument_of_a_rule": (lambda x: with_static(3, x), lambda x: with_static(4, x)),
    "static_array": (
        lambda x: with_static(np.arange(8), x),
        lambda x: with_static(np.arange(8.0), x),
    ),
    "static_argument_type": (lambda x: with_static(1, x), lambda x: with_static(True, x)),
    "static_signed_zero": (lambda x: with_static(0.0, x), lambda x: with_static(-0.0, x)),
    "policy": (policy("a"), policy("b")),
    "accuracy": (
        lambda x: jax.lax.tanh(x, accuracy=jax.lax.Tolerance(rtol=1e-3)),
        lambda x: jax.lax.tanh(x, accuracy=jax.lax.Tolerance(rtol=1e-4)),
    ),
    "call": (jnp.sin, jax.jit(lambda x: jnp.sin(x))),
    "saved_name": (
        lambda x: checkpoint_name(x, "a"),
        lambda x: checkpoint_name(x, "b"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs_are_told_apart(name):
    assert not same(*DIFFERENT[name])


@pytest.mark.parametrize(
    "other",
    [
        jax.ShapeDtypeStruct((7,), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.float16),
        jax.ShapeDtypeStruct((8,), jnp.float32, weak_type=True),
    ],
    ids=str,
)
def test_types_are_part_of_a_program(other):
    assert not same(lambda x: x, lambda x: x, X, other)


def test_context_of_an_equation_is_part_of_a_program():
    def f(x):
        with set_xla_metadata(kind="a"):
            return jnp.sin(x)

    assert same(f, f)
    assert not same(f, jnp.sin)


scaled_p = Primitive("scaled")
scaled_p.def_abstract_eval(lambda x, *, by: x)
scaled_p.def_impl(functools.partial(apply_primitive, scaled_p))
mlir.register_lowering(scaled_p, mlir.lower_fun(lambda x, *, by: x * by, multiple_results=False))


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, -math.nan, False),
        (float("nan"), float("nan"), True),
        ((1, (2.0,)), (1, (2.0,)), True),
        ((1, (2.0,)), (1, (2,)), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        (frozenset({0.0}), frozenset({-0.0}), False),
        (np.float32(1), np.float64(1), False),
        (jnp.float32, jnp.float16, False),
        (lambda: 0, lambda: 0, False),
        (object(), object(), False),
        (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST, False),
        (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("a"), True),
        (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b"), False),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=0), True),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1), False),
    ],
    # Without addresses, which differ from process to process.
    ids=lambda x: re.sub(r" at 0x\w+", "", repr(x)),
)
def test_parameters_are_compared_exactly(a, b, equal):
    assert same(lambda x: scaled_p.bind(x, by=a), lambda x: scaled_p.bind(x, by=b)) is equal


def test_constants_are_refused_with_a_remedy():
    table = jnp.arange(8.0)
    with pytest.raises(ValueError, match=r"found float32\[8\]: make them arguments"):
        intern(trace(lambda x: x + table, X))
    nested = trace(lambda x: jax.jit(lambda x: x + table)(x), X)
    with pytest.raises(ValueError, match="`inline` brings those of an inner `jit` to the top"):
        intern(nested)
    assert len(inline(nested).consts) == 1


def test_program_is_held_weakly():
    f = lambda x: jax.nn.relu(x) * 7.25
    program = weakref.ref(intern(trace(f, X)))
    assert program() is intern(trace(lambda x: f(x), X))
    del f
    jax.clear_caches()
    gc.collect()
    assert program() is None


def test_interned_parameter_stops_compilation_of_fresh_closures():
    compiled = []

    def lower(x, *, program):
        compiled.append(program)
        return jaxpr_as_fun(program)(x)[0]

    run_p = Primitive("run")
    run_p.def_abstract_eval(lambda x, *, program: program.out_avals[0])
    run_p.def_impl(functools.partial(apply_primitive, run_p))
    mlir.register_lowering(run_p, mlir.lower_fun(lower, multiple_results=False))

    for _ in range(3):
        program = intern(trace(lambda x: jax.nn.silu(x) + 1.0, X))
        np.testing.assert_allclose(run_p.bind(X, program=program), jax.nn.silu(X) + 1.0, rtol=1e-6)
    assert len(compiled) == 1
