"""Mods taken apart: what runs outside, what is read, and what it means for values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import once
from xform.jaxpr import rewrite, trace, walk
from xform.primitives._mods import take_apart
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal

RNG = np.random.default_rng(0)
T, H = 12, 2
IMPLEMENTATIONS = (None, "reference")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


Q, K, V = normal(2, T, H, 8), normal(2, T, H, 8), normal(2, T, H, 8)
TABLE, PAIRS, HEADS, BATCH = normal(T), normal(H, T, T), normal(H), normal(2, T)
IDS = jnp.asarray(RNG.integers(0, 3, T), jnp.int32)


def parts(score=None, mask=None):
    return take_apart(score, mask, jnp.float32)


def both(score=None, mask=None):
    """Attention with mods, and the same of the dense oracle."""
    attend = lambda how: flex_attention(Q, K, V, score_mod=score, mask_mod=mask, implementation=how)
    return once(lambda: [attend(how) for how in IMPLEMENTATIONS])


def gradients(f, *args):
    """The gradient of `f(*args, implementation)` in its first argument, with either."""
    return once(lambda *args: [jax.grad(f)(*args, how) for how in IMPLEMENTATIONS], *args)


def assert_same(found, true):
    for x, y in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        assert np.abs(y).max() > 1e-3
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5 * np.abs(y).max())


# ---- Reads ---------------------------------------------------------------------------------------

SCALAR = jnp.float32(0.3)
READS = {
    "scalar": (lambda s, b, h, q, k: s * SCALAR, ""),
    "whole array": (lambda s, b, h, q, k: s * TABLE.sum(), ""),
    "by batch": (lambda s, b, h, q, k: s + BATCH[b, 3], ""),
    "by head": (lambda s, b, h, q, k: s + HEADS[h], "h"),
    "by query": (lambda s, b, h, q, k: s + TABLE[q], "q"),
    "by key": (lambda s, b, h, q, k: s + BATCH[b, k], "k"),
    "by head and key": (lambda s, b, h, q, k: s + PAIRS[h, 0, k], "hk"),
    "by distance": (lambda s, b, h, q, k: s + TABLE[jnp.abs(q - k)], "qk"),
    "by pair": (lambda s, b, h, q, k: s + PAIRS[h, q, k], "hqk"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_known_by_the_indices_that_it_depends_on(name):
    score, dims = READS[name]
    ((read,),) = parts(score).reads
    assert read.dims == dims


def test_reads_of_one_array_share_its_operand_and_those_of_two_do_not():
    mods = parts(lambda s, b, h, q, k: s + TABLE[q] * TABLE[k] + HEADS[h] + TABLE[q])
    assert [sorted(r.dims for r in group) for group in mods.reads] in (
        [["k", "q"], ["h"]], [["k", "q", "q"], ["h"]],
    )  # fmt: skip
    assert [x.shape for x in mods.captures] == [(T,), (H,)]


def test_an_index_that_depends_on_the_score_reads_the_whole_array():
    def score(s, b, h, q, k):
        return s + TABLE[jnp.clip(jnp.int32(3 * s), 0, T - 1)]

    ((read,),) = parts(score).reads
    assert read.dims == ""
    assert read.shape == (T,)
    assert_same(*both(score))


def test_the_mask_is_known_by_the_indices_that_it_depends_on():
    dims = lambda mask: parts(mask=mask).mask_dims
    assert dims(causal()) == "qk"
    assert dims(lambda b, h, q, k: k < h + b) == "bhk"
    assert dims(lambda b, h, q, k: IDS[q] > 0) == "q"


def test_what_an_index_reads_is_context():
    mods = parts(lambda s, b, h, q, k: s + HEADS[IDS[q]], lambda b, h, q, k: IDS[q] == IDS[k])
    assert mods.reads[-1][0].dims == "q"
    assert mods.captures[-1].shape == (H,)
    assert {x.shape for x in mods.context} == {(T,)}
    assert all(jnp.array_equal(x, IDS) for x in mods.context)


# ---- What runs outside ---------------------------------------------------------------------------


def test_equations_without_an_index_run_once_and_outside():
    """`exp(table)` and the sum stand in the program around, on whole arrays, and not inside."""

    def f(table):
        score = lambda s, b, h, q, k: s * jnp.sum(table) + jnp.exp(table)[q - k]
        return flex_attention(Q, K, V, score_mod=score)

    jaxpr = trace(f, TABLE)
    outside = [e.primitive.name for e in jaxpr.eqns]
    (inside,) = (e for e in jaxpr.eqns if e.primitive.name == "flex_attention")
    assert outside.count("exp") == 1
    assert "reduce_sum" in outside
    program = [s.eqn.primitive.name for s in walk(inside.params["spec"].score)]
    assert "exp" not in program
    assert "reduce_sum" not in program


def test_the_function_inside_is_interned():
    make = lambda table: lambda s, b, h, q, k: jnp.tanh(s) + table[q - k]
    one, two = (parts(make(table)) for table in (TABLE, -TABLE))
    assert one.score is two.score
    assert one.reads == two.reads
    assert parts(lambda s, b, h, q, k: jnp.tanh(s) + TABLE[k - q]).reads != one.reads


def test_derivative_rules_stay_inside():
    """`relu` and a rule of the user's own: gradients are the rules', not those of their bodies."""

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    doubled.defjvp(lambda primals, tangents: (2 * primals[0], 5 * tangents[0]))

    def f(table, how=None):
        score = lambda s, b, h, q, k: doubled(table[k]) + jax.nn.relu(s)
        return jnp.sin(flex_attention(Q, K, V, score_mod=score, implementation=how)).sum()

    program = parts(lambda s, *index: jax.nn.relu(s)).score
    assert [e.primitive.name for e in program.eqns] == ["custom_jvp_call"]
    assert_same(*gradients(f, TABLE))


def test_a_reverse_rule_stays_inside():
    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, x), lambda x, ct: (5 * x * ct,))

    def f(table, how=None):
        score = lambda s, b, h, q, k: s + scaled(table[k])
        return jnp.sin(flex_attention(Q, K, V, score_mod=score, implementation=how)).sum()

    assert_same(*gradients(f, TABLE))


# ---- What may be captured ------------------------------------------------------------------------


def test_integers_and_bools_are_read_and_get_no_gradient():
    flags = IDS > 0

    def f(captures, how=None):
        ids, flags, table = captures

        def score(s, b, h, q, k):
            return jnp.where(flags[q] & (ids[q] == ids[k]), s, s * 0.5) + ids[k] * table[ids[q]]

        return jnp.sin(flex_attention(Q, K, V, score_mod=score, implementation=how)).sum()

    pull = lambda c, how: jax.grad(f, allow_int=True)(c, how)
    (ids, bools, table), true = once(
        lambda c: [pull(c, how) for how in IMPLEMENTATIONS], (IDS, flags, TABLE)
    )
    assert ids.dtype == bools.dtype == jax.dtypes.float0
    assert_same(table, true[2])


def test_one_array_may_be_read_by_both_mods():
    """The mask gives no gradient, the score does."""

    def f(table, how=None):
        score = lambda s, b, h, q, k: s + table[k]
        mask = lambda b, h, q, k: (table[k] > -0.5) | (q == k)
        out = flex_attention(Q, K, V, score_mod=score, mask_mod=mask, implementation=how)
        return jnp.sin(out).sum()

    assert_same(*gradients(f, TABLE))


@pytest.mark.parametrize("capture", [0.7, np.float32(0.7), np.asarray(TABLE), [0.1, 0.2]])
def test_python_and_numpy_values_are_captured(capture):
    pick = (lambda k: jnp.asarray(capture)[k % 2]) if np.ndim(capture) else (lambda k: capture)
    assert_same(*both(lambda s, b, h, q, k: s * pick(k)))


def test_a_numpy_array_is_indexed_by_a_traced_index_as_a_jax_array_is():
    table = jnp.asarray(np.asarray(TABLE))
    assert_same(*both(lambda s, b, h, q, k: s + table[k - q] * np.float32(2)))


def test_an_index_out_of_range_follows_numpys_rules_in_jax():
    """Negative ones count from the end, others are clipped, or filled where asked for."""

    def score(table):
        filled = lambda i: table.at[i].get(mode="fill", fill_value=-2.0)
        return lambda s, b, h, q, k: s + table[k - 20] * table[q + 4] + filled(q + k)

    attend = lambda how: flex_attention(Q, K, V, score_mod=score(TABLE), implementation=how)

    def f(table, how):
        return jnp.sin(flex_attention(Q, K, V, score_mod=score(table), implementation=how)).sum()

    assert_same(*once(lambda: [attend(how) for how in IMPLEMENTATIONS]))
    assert_same(*gradients(f, TABLE))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_the_gradient_of_a_narrow_capture_is_summed_in_float32(dtype):
    """4,096 shares of one entry: a narrow sum would stop growing long before the end."""
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 512, 1, 8)), dtype) for _ in range(3))

    def f(c):
        score = lambda s, b, h, q_idx, kv_idx: s + c[0] * (q_idx + kv_idx).astype(jnp.float32)
        out = flex_attention(q, k, v, score_mod=score)
        return out.astype(jnp.float32).sum((0, 1, 2)) @ jnp.arange(8.0)

    c = jnp.asarray([0.01], dtype)
    narrow, wide = once(lambda *cs: [jax.grad(f)(c) for c in cs], c, c.astype(jnp.float32))
    assert narrow.dtype == dtype
    assert narrow == wide.astype(dtype)


def test_captured_tracers_of_every_transform():
    """The captured array is a tracer of scan, of vmap, of grad and of jit at once."""

    def program(how):
        def step(total, row):
            score = lambda s, b, h, q, k: s + row[k] * total
            out = flex_attention(Q, K, V, score_mod=score, implementation=how)
            return jnp.tanh(jnp.sin(out).mean()), None

        run = lambda tables: jax.lax.scan(step, jnp.float32(0.5), tables)[0]
        return jax.vmap(jax.value_and_grad(run))(normal_stack)

    normal_stack = normal(2, 3, T)
    assert_same(*once(lambda: [program(how) for how in IMPLEMENTATIONS]))


def test_mods_may_be_jitted_and_hold_control_flow():
    @jax.jit
    def score(s, b, h, q, k):
        s = jax.lax.cond(q > k, lambda: s + TABLE[q - k], lambda: s * HEADS[h])
        return jax.lax.fori_loop(0, 3, lambda i, s: s * 0.9 + TABLE[i], s)

    assert_same(*both(score, jax.jit(causal())))


def test_mods_may_draw_random_numbers():
    key = jax.random.key(0)

    def score(s, b, h, q, k):
        noise = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, q), k))
        return s + noise

    assert_same(*both(score))


# ---- Errors --------------------------------------------------------------------------------------


def test_side_effects_are_refused_by_line():
    def score(s, b, h, q, k):
        jax.debug.print("score {s}", s=s)
        return s

    with pytest.raises(
        NotImplementedError, match=r"side effects \(at .*test_mods\.py:\d+ \(.*score\)"
    ):
        flex_attention(Q, K, V, score_mod=score)

    def mask(b, h, q, k):
        jax.debug.callback(lambda q: None, q)
        return q >= k

    with pytest.raises(
        NotImplementedError, match=r"side effects \(at .*test_mods\.py:\d+ \(.*mask\)"
    ):
        flex_attention(Q, K, V, mask_mod=mask)


def in_a_branch(s, b, h, q, k):
    return jax.lax.cond(q > k, lambda: s, lambda: jnp.sort(TABLE * s)[0])


def with_one_outside(s, b, h, q, k):
    s = s + jnp.sort(TABLE)[q]
    return s * jnp.sort(TABLE + s)[0]


def solved(s, b, h, q, k):
    return s + jnp.linalg.solve(PAIRS[0] + s, TABLE)[0]


def called(s, b, h, q, k):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), s)


def nested(s, b, h, q, k):
    return s + flex_attention(Q * s, K, V).sum()


def drawn_from(s, b, h, q, k):
    return s + jnp.fft.fft(TABLE * s).real[0]


@pytest.mark.parametrize(
    ("score", "line", "message"),
    [
        (in_a_branch, 1, r"`sort` works on an array as a whole"),
        (with_one_outside, 2, r"`sort` works on an array as a whole"),
        (solved, 1, r"`lu` solves or factors a matrix"),
        (called, 1, r"`pure_callback` calls back to the host"),
        (nested, 1, r"`flex_attention` is a kernel itself"),
        (drawn_from, 1, r"`fft` works on an array as a whole"),
    ],
)
def test_what_no_kernel_does_is_refused_by_line(score, line, message):
    at = score.__code__.co_firstlineno + line
    with pytest.raises(
        NotImplementedError, match=rf"`score_mod` can't be fused: {message}.*test_mods\.py:{at} "
    ):
        flex_attention(Q, K, V, score_mod=score)


def test_the_same_is_welcome_where_it_depends_on_no_index():
    jax.eval_shape(lambda: flex_attention(Q, K, V, score_mod=lambda s, *i: s * jnp.sort(TABLE)[0]))


def test_what_only_an_index_reads_is_no_operand_of_the_score():
    heads, ids = jnp.arange(2.0), jnp.arange(12) % 2
    mods = take_apart(lambda s, b, h, q, k: s + heads[ids[q]], None, jnp.dtype("float32"))
    assert [x.shape for x in mods.captures] == [(2,)]
    assert [x.shape for x in mods.context] == [(12,)]


def test_the_walker_sees_and_rewrites_what_is_inside():
    q = normal(1, 12, 2, 8)
    attend = lambda wave: (
        lambda q: flex_attention(
            q, q, q, score_mod=lambda s, b, h, i, j: wave(s), mask_mod=causal()
        ).sum()
    )
    names = [site.eqn.primitive.name for site in walk(trace(attend(jnp.sin), q))]
    assert names.count("sin") == 1
    rewritten = rewrite(attend(jnp.sin), {"sin": lambda x, **_: jnp.cos(x)})
    for transform in (lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))):
        both = [transform(f) for f in (rewritten, attend(jnp.cos))]
        found, wanted = once(lambda q, both=both: [f(q) for f in both], q)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
