"""Mods that can't be: the error names the user's function and line, and what to write instead."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.oracle import once
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal
from xform.sharding.mesh import make_mesh, shardings

X = jnp.ones((1, 8, 2, 16))
Y = jnp.arange(256.0).reshape(X.shape)
TABLE, PHASES = np.arange(8.0), jnp.ones(8, jnp.complex64)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else 2 * score


def chains(b, h, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 3


def reads_numpy(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx]


def reads_list(score, b, h, q_idx, kv_idx):
    return score + [1.0, 2.0][h]


def as_number(score, b, h, q_idx, kv_idx):
    return score * float(q_idx)


def looks_up(score, b, h, q_idx, kv_idx):
    return score + {0: 1.0, 1: 2.0}[h]


def cuts(score, b, h, q_idx, kv_idx):
    return score + jnp.asarray(TABLE)[:q_idx].sum()


class Branches:
    """An object that is called."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        return branches(score, b, h, q_idx, kv_idx)


def without_keys(score, b, h, q_idx):
    return score


def complex_read(score, b, h, q_idx, kv_idx):
    return score + PHASES[q_idx].real


def integer(score, b, h, q_idx, kv_idx):
    return q_idx - kv_idx


def pair(score, b, h, q_idx, kv_idx):
    return score, score


ERRORS = {
    branches: r"`branches` \(.*test_mod_errors.py:\d+\) .*`jnp.where\(condition, x, y\)`",
    chains: r"`mask_mod` `chains` .*`\(a <= x\) & \(x < b\)`",
    reads_numpy: r"`reads_numpy` .*`jnp.asarray\(array\)\[q_idx\]`",
    reads_list: r"`reads_list` .*`jnp.asarray\(items\)\[q_idx\]`",
    looks_up: r"`looks_up` .*`jnp.asarray\(list\(table.values\(\)\)\)\[q_idx\]`",
    cuts: r"`cuts` .*`jnp.where\(jnp.arange\(len\(x\)\) < q_idx, x, 0\)` for `x\[:q_idx\]`",
    as_number: r"`as_number` .*compute with `jax.numpy`",
    without_keys: r"`score_mod\(score, b, h, q_idx, kv_idx\)`, and `without_keys` .*takes",
    complex_read: r"complex arrays \(complex64\[8\]\).*`x.real\[q_idx\]`",
    integer: r"must return a floating-point number.*`integer` .* returned int32\[\]",
    pair: r"must return a floating.*`pair` .* returned \('float32\[\]', 'float32\[\]'\)",
}


@pytest.mark.parametrize("mod", ERRORS, ids=lambda mod: mod.__name__)
def test_a_mod_that_cannot_be_is_named_with_its_line_and_a_cure(mod):
    name = "mask_mod" if mod is chains else "score_mod"
    with pytest.raises((TypeError, ValueError), match=ERRORS[mod]):
        flex_attention(X, X, X, **{name: mod})


@pytest.mark.parametrize(
    ("mod", "name"),
    [(Branches(), "Branches.__call__"), (partial(branches), "branches")],
    ids=["an object", "a partial function"],
)
def test_whatever_is_called_has_a_name_and_a_line(mod, name):
    with pytest.raises(TypeError, match=rf"`score_mod` `{name}` \(.*test_mod_errors.py:\d+\)"):
        flex_attention(X, X, X, score_mod=mod)


def test_an_error_inside_a_mod_is_the_users_own_with_a_note():
    def fails(score, b, h, q_idx, kv_idx):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        flex_attention(X, X, X, score_mod=fails)
    assert re.search(r"in the `score_mod` `.*fails` \(.*:\d+\)", "".join(caught.value.__notes__))


def grows(score, b, h, q_idx, kv_idx):
    return jax.lax.while_loop(lambda s: s < 3, lambda s: 2 * s + 1, score)


def grows_as_well(score, b, h, q_idx, kv_idx):
    """The same program: an error is not of its first user's line."""
    return jax.jit(lambda s: jax.lax.while_loop(lambda s: s < 3, lambda s: 2 * s + 1, s))(score)


def grows_by_pair(score, b, h, q_idx, kv_idx):
    """A loop that is written anew, with a choice for the branch in it."""
    turn = lambda s: jax.lax.cond(q_idx > kv_idx, lambda: 2 * s + 1, lambda: s + 1)
    return jax.lax.while_loop(lambda s: s < 3, turn, score)


@pytest.mark.parametrize("mod", [grows, grows_as_well, grows_by_pair])
def test_a_loop_of_unknown_length_has_no_gradient_in_reverse(mod):
    total = lambda x, mod=mod: flex_attention(x, x, x, score_mod=mod).sum()
    assert np.isfinite([total(X), total(X, grows)]).all()
    with pytest.raises(
        NotImplementedError, match=rf"`while` \(at .*errors.py:\d+ \({mod.__name__}"
    ):
        jax.grad(total)(X)


def test_a_loop_of_unknown_length_is_differentiated_forward():
    total = lambda x: flex_attention(x, x, x, score_mod=grows).sum()
    assert np.isfinite(jax.jvp(total, (X,), (X,))[1])


@jax.custom_vjp
def backward_only(x):
    return jnp.sin(x)


backward_only.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
UNDERIVABLE = {
    "nextafter": (jax.grad, lambda s: jnp.nextafter(s, 2.0)),
    "regularized_incomplete_beta": (
        jax.grad, lambda s: jax.scipy.special.betainc(jnp.abs(s) + 0.1, 1.0, 0.5),
    ),
    "igamma": (
        lambda f: jax.jacfwd(jax.grad(f)), lambda s: jax.lax.igamma(jnp.abs(s) + 0.1, 1.0),
    ),
    "custom_vjp_call": (jax.jacfwd, backward_only),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERIVABLE)
def test_a_derivative_that_jax_does_not_have_is_named_with_its_line(name):
    derivative, f = UNDERIVABLE[name]
    total = lambda x: flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: f(s)).sum()
    where = rf"no such derivative: `{name}` \(at .*errors.py:\d+ .*Write `jax.custom_jvp`"
    with pytest.raises(NotImplementedError, match=where):
        derivative(total)(X)


REF = jax.new_ref(jnp.ones(8))
ONE = jax.make_mesh((1,), ("one",))
OUTSIDE = {
    "a reference": (TypeError, "reads what may change, Ref", lambda s, q: s + REF[q]),
    "a shape": (TypeError, "make arrays of a size that is known", lambda s, q: s + jnp.zeros(q)[0]),
    "a mesh": (
        NotImplementedError, r"on no mesh: `shard_map` \(at .*errors.py",
        lambda s, q: jax.shard_map(lambda x: x, mesh=ONE, in_specs=P(), out_specs=P())(s),
    ),
    "a placement": (
        NotImplementedError, r"on no mesh: `sharding_constraint` \(at .*errors.py",
        lambda s, q: jax.lax.with_sharding_constraint(s, NamedSharding(ONE, P())),
    ),
    "numbers of no key": (
        NotImplementedError, r"`rng_uniform` may draw other numbers .*errors.py",
        lambda s, q: jax.lax.rng_uniform(s, s + 1, ()),
    ),
    "a sort in a function of JAX's": (
        NotImplementedError, r"`sort` works on an array as a whole.*\(at .*errors.py",
        lambda s, q: jnp.sort(jnp.stack([s, 2.0]))[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_belongs_outside_of_a_mod_is_named(name):
    kind, words, f = OUTSIDE[name]
    with pytest.raises(kind, match=words):
        flex_attention(X, X, X, score_mod=lambda s, b, h, q, k: f(s, q))


def test_a_sum_over_vmap_is_no_question_of_devices():
    mod = lambda s, b, h, q, k: jax.lax.psum(s, "i")
    attend = jax.vmap(lambda x: flex_attention(x, x, x, score_mod=mod), axis_name="i")
    with pytest.raises(NotImplementedError, match=r"may not communicate.*`psum` over \('i',\)"):
        attend(X[None])


VECTORS = {
    "logsumexp": lambda s: jax.nn.logsumexp(jnp.stack([s, 2 * s, 1.0])),
    "softmax": lambda s: jax.nn.softmax(jnp.stack([s, 1.0]))[0],
    "a share": lambda s: (jnp.stack([s, 2.0]) / jnp.stack([s, 9.0]).sum(keepdims=True))[1],
    "an outer product": lambda s: jnp.outer(jnp.stack([s, 1.0]), jnp.arange(2.0)).sum(),
    "a determinant": lambda s: jnp.linalg.det(jnp.eye(3) + 0.1 * s),
}


@pytest.mark.parametrize("name", VECTORS)
def test_small_arrays_inside_a_mod(name):
    mod = lambda s, b, h, q, k: VECTORS[name](s)
    total = lambda how, x: flex_attention(x, x, x, score_mod=mod, implementation=how).sum()
    found, true = (once(jax.grad(partial(total, how)), X) for how in (None, "reference"))
    np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-6 * np.abs(true).max())


@pytest.mark.parametrize("key", [jnp.ones(2), jnp.ones(2, int), jnp.ones(3, jnp.uint32)], ids=str)
def test_what_is_no_random_key_is_said(key):
    with pytest.raises(TypeError, match=r"`dropout_key` is .*needed is a key, `jax.random.key"):
        flex_attention(X, X, X, dropout_rate=0.1, dropout_key=key)


def test_numpy_arrays_are_taken_as_jax_takes_them():
    x = np.random.default_rng(0).normal(size=X.shape)
    out = flex_attention(x, X, x)
    assert out.dtype == X.dtype
    np.testing.assert_array_equal(out, flex_attention(jnp.asarray(x), X, jnp.asarray(x)))


def test_random_numbers_may_be_drawn_in_a_mod():
    def noisy(score, b, h, q_idx, kv_idx):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), q_idx), kv_idx)
        return score + jax.random.normal(key)

    run = lambda how: flex_attention(X, X, Y, score_mod=noisy, implementation=how)
    np.testing.assert_allclose(run(None), run("reference"), rtol=1e-5)


def test_a_traced_scale_hides_no_name():
    with pytest.raises(TypeError, match="`score_mod` `branches`"):
        flex_attention(X, X, X, score_mod=branches, scale=jnp.float32(0.3))


def test_a_mod_that_asks_for_its_device_is_told_to_ask_before():
    mesh = make_mesh(dp=8)
    x = jax.device_put(jnp.ones((8, 4, 2, 16)), shardings(mesh, jax.P("dp")))

    def device(score, b, h, q_idx, kv_idx):
        return score + jax.lax.axis_index("dp")

    def attend(mod, x):
        return flex_attention(x, x, x, score_mod=mod, mask_mod=causal())

    def before(x):
        index = jax.lax.axis_index("dp")
        return attend(lambda score, *_: score + index, x)

    run = lambda f: jax.shard_map(f, mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P("dp"))(x)
    with pytest.raises(NotImplementedError, match=r"`axis_index` over .*test_mod_errors.py:\d+"):
        run(lambda x: attend(device, x))
    np.testing.assert_allclose(run(before), run(lambda x: attend(None, x)), rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": jnp.float32(0.1)}, "`dropout_rate` is an array; needed is a Python"),
        ({"sinks": jnp.ones(2, int)}, "`sinks` has dtype int32; needed is a floating-point"),
    ],
)
def test_options_of_a_wrong_kind_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        flex_attention(X, X, X, **options)


@pytest.mark.usefixtures("unchecked")
def test_what_is_of_no_use_is_named_all_at_once():
    match = "`q` is of type list; .*`aux` is 3; .*`dropout_rate` is 'a'; .*`dropout_key` is 7; nee"
    attend: Any = flex_attention
    with pytest.raises(TypeError, match=match):
        attend([1.0], X, X, aux=3, dropout_rate="a", dropout_key=7)
    with pytest.raises(TypeError, match="`scale` is 'a'; needed is a number"):
        attend(X, X, X, scale="a")


@pytest.mark.usefixtures("unchecked")
def test_positions_are_counted_in_int32():
    keys = jax.ShapeDtypeStruct((1, 2**30 + 1, 1, 1), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.bfloat16)
    with pytest.raises(ValueError, match="1,073,741,825 positions; indices are int32"):
        jax.eval_shape(flex_attention, q, keys, keys)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn"])
def test_a_dtype_without_attention_is_named(dtype):
    x = X.astype(dtype)
    with pytest.raises(ValueError, match=f"`v` has dtype {dtype}; needed is one of bfloat16"):
        flex_attention(x, x, x)


KEY = jax.random.key(3)
OLD_KEY = jax.random.PRNGKey(3)


def drawn_once(score, *_):
    return score + jax.random.normal(jax.random.key(0))


def drawn_for_each(b, h, q_idx, kv_idx):
    key = jax.random.fold_in(jax.random.key(0), q_idx * 8 + kv_idx)
    return jax.random.bernoulli(key, 0.5)


def drawn_with_an_old_key(b, h, q_idx, kv_idx):
    key = jax.random.fold_in(jax.random.PRNGKey(1), q_idx * 8 + kv_idx)
    return jax.random.bernoulli(key, 0.5)


def captured(b, h, q_idx, kv_idx):
    return jax.random.bernoulli(jax.random.fold_in(KEY, q_idx * 8 + kv_idx), 0.5)


def captured_old(score, b, h, q_idx, kv_idx):
    return score + jax.random.uniform(jax.random.fold_in(OLD_KEY, kv_idx))


def split(score, b, h, q_idx, kv_idx):
    return score + jax.random.uniform(jax.random.split(jax.random.key(0), 8)[kv_idx])


def in_a_branch(score, b, h, q_idx, kv_idx):
    louder = lambda x: x + jax.random.uniform(jax.random.key(7))
    return jax.lax.cond(q_idx > kv_idx, louder, lambda x: x, score)


def in_a_loop(score, b, h, q_idx, kv_idx):
    key = lambda i: jax.random.fold_in(jax.random.key(0), i + kv_idx)
    return jax.lax.fori_loop(0, 2, lambda i, s: s + jax.random.uniform(key(i)), score)


@pytest.mark.parametrize(
    "mod",
    [
        drawn_once,
        drawn_for_each,
        in_a_loop,
        *(
            pytest.param(mod, marks=pytest.mark.slow)
            for mod in (drawn_with_an_old_key, captured, captured_old, split, in_a_branch)
        ),
    ],
    ids=lambda mod: mod.__name__,
)
def test_a_random_key_may_be_made_in_a_mod(mod):
    """It draws the same numbers as in the dense program, in every tile and every gradient."""
    q, k, v = jax.random.normal(KEY, (3, 1, 8, 2, 16))
    name = "mask_mod" if "score" not in mod.__code__.co_varnames else "score_mod"

    def loss(implementation, *qkv):
        out = flex_attention(*qkv, **{name: mod}, implementation=implementation)
        return jnp.sin(out).sum(), out

    gradients = jax.grad(loss, (1, 2, 3), has_aux=True)
    found, true = (once(partial(gradients, how), q, k, v) for how in (None, "reference"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), found, true)
    plain = flex_attention(q, k, v)
    assert np.abs(found[1] - plain).max() > 0.1 or mod is drawn_once  # which softmax takes out
