"""Arrays that a mod reads as a whole: in a branch, a loop, at an index that its score decides.

Each pair of a query and a key reads what it wants, and neither pass makes an array of each of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.oracle import once
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal

RNG = np.random.default_rng(0)


@jax.custom_jvp
def look(table, i):
    return table[i]


look.defjvp(lambda primals, tangents: (look(*primals), tangents[0][primals[1]]))


def by_head(s, h, q, k, t):
    return lax.switch(h, [lambda: s + t[(q + k) % len(t)], lambda: s * t[k % len(t)]])


def in_turns(s, q, k, t):
    """A loop, of which a turn chooses a branch."""
    turn = lambda i, s: lax.cond(q - i > k, lambda: s + t[(q - k + i) % len(t)], lambda: 0.9 * s)
    return lax.fori_loop(0, 2, turn, s)


def by_score(s, t):
    return s + t[jnp.clip((3 * s).astype(jnp.int32) + len(t) // 2, 0, len(t) - 1)]


KINDS = {
    "a branch": lambda s, h, q, k, t: lax.cond(q > k, lambda: s + t[(q - k) % len(t)], lambda: s),
    "a branch by head": by_head,
    "a loop": lambda s, h, q, k, t: lax.fori_loop(
        0, 3, lambda i, s: s + t[(q - k + i) % len(t)], s
    ),
    "a branch in a loop": lambda s, h, q, k, t: in_turns(s, q, k, t),
    "a derivative of its own": lambda s, h, q, k, t: s + look(t, (q - k) % len(t)),
    "an index by the score": lambda s, h, q, k, t: by_score(s, t),
    "an array changed by the query": lambda s, h, q, k, t: (
        s + t.at[q % len(t)].set(0.0)[k % len(t)]
    ),
}  # fmt: skip


# Made of the key: where hidden, they stand at another pair of it, and not of the query.
OF_KEYS = {
    "an array changed by the key": lambda s, h, q, k, t: (
        s + t.at[k % len(t)].set(0.0)[q % len(t)]
    ),
    "a loop over an array of the key": lambda s, h, q, k, t: (
        s + lax.fori_loop(0, 2, lambda i, t: t.at[(k + i) % len(t)].multiply(1.5), t)[q % len(t)]
    ),
}  # fmt: skip
QUICK = {"a branch in a loop", "an array changed by the query", "an array changed by the key"}


def of_all(s, h, q, k, t):
    """All kinds one after the other; what each adds is small, so that none is drowned."""
    for kind in KINDS.values():
        s = s + jnp.tanh(kind(s, h, q, k, t) - s)
    return s


def loss(kind, mask, implementation=None):
    def f(q, k, v, t):
        score = lambda s, b, h, i, j: kind(s, h, i, j, t)
        out = flex_attention(q, k, v, score_mod=score, mask_mod=mask, implementation=implementation)
        return jnp.sin(3 * out).sum()

    return f


def inputs(length, table, dtype: Any = np.float64):
    normal = lambda *shape: RNG.normal(size=shape).astype(dtype)
    return *(normal(1, length, 2, 8) for _ in range(3)), normal(table)


@pytest.mark.parametrize(
    "kind",
    [
        of_all,
        OF_KEYS["a loop over an array of the key"],
        *(pytest.param(f, marks=pytest.mark.slow) for f in KINDS.values()),
    ],
    ids=["all", "of keys", *KINDS],
)
def test_no_pass_makes_an_array_of_each_pair(kind):
    """Temporaries of a compiled gradient, in which the forward pass is.

    A table for each pair of one tile would take 1,024 MiB, one for each query 4.
    """
    x = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in inputs(512, 4096)]
    grad = jax.jit(jax.grad(loss(kind, causal()), (0, 1, 2, 3)))
    assert grad.lower(*x).compile().memory_analysis().temp_size_in_bytes < 40 * 2**20


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        pytest.param(of_all, 400, marks=pytest.mark.slow),
        *(
            pytest.param(f, 24, marks=() if n in QUICK else pytest.mark.slow)
            for n, f in (KINDS | OF_KEYS).items()
        ),
    ],
    ids=["all, many tiles", *KINDS, *OF_KEYS],
)
def test_values_and_gradients_are_the_dense_ones(kind, length):
    """In float64, in full tiles and partial ones; second derivatives of each kind by itself."""

    def program(how):
        f = loss(kind, causal(), how)
        first = jax.value_and_grad(f, (0, 1, 2, 3))
        if length > 100:
            return first
        along = lambda *x: tuple(jnp.cos(5 * a) for a in x)
        return lambda *x: (first(*x), jax.jvp(jax.grad(f, (0, 3)), x, along(*x))[1])

    with jax.enable_x64(True):
        x = inputs(length, 16)
        assert_close(*(once(program(how), *x) for how in (None, "reference")))


def test_an_array_of_each_pair_that_no_tile_can_hold_is_named_with_its_line():
    kind = lambda s, h, q, k, t: s + t.at[(q + k) % len(t)].set(0.0)[0]
    x = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in inputs(512, 4096)]
    where = (
        r"array of each pair.*`scatter` \(at .*arrays.py:\d+ .*float32\[.*4096\].*jax.vmap\(make\)"
    )
    for mask in (causal(), None):
        with pytest.raises(NotImplementedError, match=where):
            jax.jit(loss(kind, mask)).lower(*x)


def assert_close(found, true):
    for a, b in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        assert np.isfinite(b).all()
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * np.abs(b).max())


def test_what_is_hidden_has_no_influence_on_an_array_that_is_read_as_a_whole():
    """Its derivative would be NaN there: of a logarithm, and of entries that only it reads.

    A query has no key, one key is seen by none, and a tile of 400 positions is partial.
    """

    def kind(s, h, q, k, t):
        turn = lambda i, s: s + t[k // 25 + i] * jnp.log(q - k) + look(t, k // 25)
        return lax.fori_loop(0, 2, turn, s)

    mask = lambda b, h, q, k: (q > k) & (k < 325)
    with jax.enable_x64(True):
        *x, t = inputs(400, 16)
        t[14:] = np.nan  # of keys from 350 on, and one turn more
        found, true = (
            once(jax.value_and_grad(loss(kind, mask, how), (0, 1, 2, 3)), *x, t)
            for how in (None, "reference")
        )
    assert not found[1][3][14:].any()
    assert_close(found, true)


@pytest.mark.parametrize("length", [8, 400])
def test_where_nothing_is_visible_there_is_no_gradient(length):
    """In the one tile there is, and in some whose mask is an array's."""
    kind = lambda s, h, q, k, t: lax.fori_loop(0, 2, lambda i, s: s + jnp.log(t[k % 16]), s)
    hidden = jnp.zeros(length, bool)
    *x, t = inputs(length, 16, np.float32)
    t[:] = -1.0
    f = lambda *x: loss(kind, lambda b, h, q, k: hidden[k] & (q >= k))(*x)
    grads = once(jax.grad(f, (0, 1, 2, 3)), *x, t)
    assert not any(np.asarray(g).any() for g in grads)


def test_a_branch_that_no_pair_decides_stays_one():
    """One of two runs: the other's endless loop is never entered."""
    x = inputs(8, 16, np.float32)
    endless = lambda s: lax.while_loop(lambda s: s < jnp.inf, lambda s: jnp.tanh(s), s)

    def attend(*x, flag):
        choose = lambda s, b, h, q, k: lax.cond(flag, lambda s: s + x[3][k], endless, s)
        return flex_attention(*x[:3], score_mod=choose)

    found = jax.jit(attend)(*x, flag=jnp.array(True))
    added = flex_attention(*x[:3], score_mod=lambda s, b, h, q, k: s + jnp.asarray(x[3])[k])
    np.testing.assert_allclose(found, added, rtol=1e-5)
