"""On random programs, rewriting nothing and interpreting equations as themselves change no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from xform.jaxpr import eqn_rule, inline, intern, interpret, rewrite, trace

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

UNARY = (jnp.sin, jnp.tanh, jax.nn.relu, jax.nn.silu, jnp.cumsum, lambda x: x[::-1], jnp.square)
BINARY = (jnp.add, jnp.multiply, jnp.maximum, lambda x, y: jnp.where(x > y, x, y * 0.5))
WRAPPERS = (
    lambda f: f,
    jax.jit,
    jax.checkpoint,
    lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x * 0.5, x),
    lambda f: lambda x: jax.lax.scan(lambda c, x: (f(c) + x, c[0]), x, x)[0],
    lambda f: lambda x: jax.vmap(f)(jnp.stack([x, -x])).sum(0),
    lambda f: jax.grad(lambda x: jnp.sum(f(x))),
)


def chain(f, g):
    return lambda x: g(f(x))


def join(op, f, g):
    return lambda x: op(f(x), g(x))


programs = st.recursive(
    st.sampled_from(UNARY),
    lambda inner: st.one_of(
        st.builds(chain, inner, inner),
        st.builds(join, st.sampled_from(BINARY), inner, inner),
        st.builds(lambda wrap, f: wrap(f), st.sampled_from(WRAPPERS), inner),
    ),
    max_leaves=6,
)
X = np.random.default_rng(0).normal(size=5).astype(np.float32)


def bind(eqn, *args):
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


class _Same(dict):
    """Every primitive's rule is the primitive."""

    def __contains__(self, key):
        return isinstance(key, str)

    def __getitem__(self, key):
        return eqn_rule(bind)


@settings(max_examples=12)
@given(programs)
def test_identity_transforms_change_no_bit(f):
    program = trace(f, X)
    run = jax.jit(lambda x: jaxpr_as_fun(program)(x)[0])
    want = run(X)
    np.testing.assert_array_equal(jax.jit(rewrite(f, {}))(X), want)
    np.testing.assert_array_equal(jax.jit(interpret(f, _Same()))(X), want)
    np.testing.assert_array_equal(jax.jit(interpret(f, {}, default=bind))(X), want)


@given(programs)
def test_programs_traced_twice_are_one(f):
    assert intern(trace(lambda x: f(x), X)) is intern(trace(lambda x: f(x), X))


@settings(max_examples=12)
@given(programs)
def test_inlined_program_is_the_same_function(f):
    flat = inline(trace(f, X))
    assert "jit[" not in str(flat)
    run = jax.jit(lambda x: jaxpr_as_fun(flat)(x)[0])
    np.testing.assert_allclose(run(X), jax.jit(f)(X), rtol=1e-5, atol=1e-5)
