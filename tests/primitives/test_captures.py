"""Everything that a score mod may read, in one program: derivatives by differences and by bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as, in_float64, once
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal

B, H, K, D = 1, 2, 1, 4


def problem(length, dtype, seed=0):
    """Random operands, with an array of each class, and the ids that one of them is read by."""
    shapes = {
        "q": (B, length, H, D), "k": (B, length, K, D), "v": (B, length, K, D), "sinks": (H,),
        "scale": (), "number": (), "heads": (H,), "row": (B, length), "column": (H, length),
        "tile": (H, length, length), "band": (2 * length,), "table": (H, 8), "lookup": (3, 3),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    x = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return x, jnp.asarray(rng.integers(0, 3, length), jnp.int32)


def loss(x, ids, implementation=None):
    """A scalar of output and log-sum-exp, which depends on every operand."""
    length = x["q"].shape[1]

    def score(s, b, h, q, k):
        far = jnp.minimum(jnp.log2(1.0 + jnp.abs(q - k)).astype(jnp.int32), 7)
        by_pair = x["tile"][h, q, k] + x["band"][q - k + length] + x["table"][h, far]
        by_one = x["heads"][h] * x["row"][b, q] + x["column"][h, k]
        return jnp.tanh(x["number"]) * s + by_one + by_pair + x["lookup"][ids[q], ids[k]]

    out, aux = flex_attention(
        x["q"], x["k"], x["v"], score_mod=score, mask_mod=causal(), scale=x["scale"],
        sinks=x["sinks"], aux=("lse",), implementation=implementation,
    )  # fmt: skip
    shift = jnp.arange(out.size).reshape(out.shape)
    return jnp.sin(out + shift).sum() + jnp.cos(aux.lse[...]).sum()


def test_first_and_second_derivatives_are_those_of_differences():
    """Along a random direction, in float64: each operand by itself, then the gradient."""
    with jax.enable_x64(True):
        (x, ids), (dx, _) = problem(6, jnp.float64), problem(6, jnp.float64, seed=1)
        step = 1e-5
        move = lambda x, dx, size: jax.tree.map(lambda a, b: a + size * b, x, dx)
        f, grad = lambda x: loss(x, ids), jax.grad(lambda x: loss(x, ids))
        slope = lambda f, dx: jax.tree.map(
            lambda a, b: (a - b) / (2 * step), f(move(x, dx, step)), f(move(x, dx, -step))
        )
        alone = [{n: dx[n] * (n == name) for n in x} for name in x]

        def run(dx):
            first = jax.lax.map(
                lambda d: slope(f, d), jax.tree.map(lambda *d: jnp.stack(d), *alone)
            )
            g = grad(x)
            found = jnp.stack([jnp.vdot(g[n], dx[n]) for n in x])
            return (found, jax.jvp(grad, (x,), (dx,))[1]), (first, slope(grad, dx))

        found, true = once(run, dx)
        for a, b in zip(*map(jax.tree.leaves, (found, true)), strict=True):
            assert (np.abs(b) > 1e-6).any()
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_gradients_of_captures_do_not_know_that_inputs_are_narrow(dtype, sinks):
    """They are sums of scores' derivatives, which add up to zero over a row if weights agree.

    A float32 program judges, and each kind is many numbers, so that none is right by luck. With
    sinks the output's cotangent is rounded before it meets values, and only what shifts a row's
    scores alike is exact: without any, its gradient is nothing at all.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape, dtype=dtype: jnp.asarray(rng.normal(size=shape), dtype)
    q, ct = normal(2, 96, 2, 16), normal(2, 96, 2, 16)
    k, v = normal(2, 96, 1, 16), normal(2, 96, 1, 16)
    shapes = {
        "shift": (2, 96), "temperature": (2, 96), "slopes": (2, 96), "row": (96,),
        "column": (96,), "table": (192,),
    }  # fmt: skip
    captures = {name: normal(*shape, dtype="float32") for name, shape in shapes.items()}
    options = {"sinks": normal(2, dtype="float32")} if sinks else {}

    def grads(c, q, k, v, ct, options, how):
        def total(c):
            out = flex_attention(
                q, k, v, score_mod=score(c), mask_mod=causal(), implementation=how, **options
            )
            return jnp.vdot(out.astype(wide), ct.astype(wide))

        wide = jnp.promote_types(q.dtype, "float32")
        found = jax.grad(total)(c)
        return {"shift": found["shift"]} if sinks else found

    def score(c):
        return lambda s, b, h, q, k: (
            s * jnp.exp(c["temperature"][h, q]) + c["shift"][h, q] + c["row"][q] * c["column"][k]
            - c["slopes"][h, q] * jnp.abs(q - k) + c["table"][q - k + 96]
        )  # fmt: skip

    dense = partial(grads, how="reference")
    inputs = captures, q, k, v, ct, options
    found = once(partial(grads, how="blockwise"), *inputs)
    judge = once(dense, *jax.tree.map(lambda x: x.astype("float32"), inputs))
    assert_as_right_as(found, judge, in_float64(dense, *inputs))


def test_gradients_over_many_tiles_have_the_same_bits_twice():
    """No sum depends on who comes first; and they are the dense program's."""
    x, ids = problem(400, jnp.float32)
    grad = jax.jit(jax.grad(loss))
    first, second = grad(x, ids), grad(x, ids)
    true = once(jax.grad(lambda x: loss(x, ids, "reference")), x)
    for name in x:
        np.testing.assert_array_equal(first[name], second[name])
        scale = np.abs(true[name]).max()
        assert scale > 1e-3, name
        np.testing.assert_allclose(first[name], true[name], rtol=0, atol=1e-4 * scale, err_msg=name)
