"""Linear cross entropy: its values and gradients, by the dense oracle; what it refuses."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as, in_float64, once
from xform import linear_cross_entropy
from xform._hlo import compile_for
from xform.jaxpr import trace, walk
from xform.lowering._loss_fn import Chunks

SMALL = Chunks(by_token=(16, 128), by_entry=(24, 128))
"""Several chunks each way, none of which divides the sizes below."""
T, D, V = 43, 13, 301

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.01},
    "everything": {"softcap": 2.0, "label_smoothing": 0.2, "z_loss": 0.01, "vocab_dim": 0},
}


def problem(t=T, d=D, v=V, dtype="float64", vocab_dim=1, seed=0):
    """Hidden states, weights, a bias, and cotangents of both results; labels, of which some not."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    weight = normal(d, v) if vocab_dim == 1 else normal(v, d)
    cts = jnp.asarray(rng.normal(size=(2, t)), jnp.promote_types(dtype, jnp.float32))
    labels = jnp.asarray(rng.integers(v, size=t) if v else np.full(t, -1), jnp.int32)
    return (normal(t, d), weight, normal(v)), labels.at[::5].set(-1), cts


def loss(x, labels, cts, implementation=None, chunks: Chunks | None = SMALL, **options):
    """A scalar in which every token's loss and log-sum-exp count differently; and both."""
    hidden, weight, bias = x
    both = linear_cross_entropy(
        hidden, weight, labels, bias=bias, implementation=implementation, chunks=chunks, **options
    )
    return sum(jnp.vdot(ct, y) for ct, y in zip(cts, both, strict=True)), both


def plain(x, labels, cts, *, softcap=None, label_smoothing=0.0, z_loss=0.0, vocab_dim=1):
    """As one would write it: logits in the dtype of the weights, the rest in float32."""
    hidden, weight, bias = x
    equation = "td,dv->tv" if vocab_dim == 1 else "td,vd->tv"
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum(equation, hidden, weight, precision="highest").astype(wide) + bias[None]
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    log_p, lse = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
    each = -(1 - label_smoothing) * chosen - label_smoothing * log_p.mean(-1) + z_loss * lse**2
    both = [jnp.where(labels == -1, 0, y) for y in (each, lse)]
    return sum(jnp.vdot(ct, y) for ct, y in zip(cts, both, strict=True)), tuple(both)


def close(found, true, rtol=1e-11):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(true), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.abs(y).max() > 1e-8, f"{name} is zero, and tests nothing"
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(), err_msg=name)


kept = partial(loss, chunks=None, keep_logits=True)


# ---- Values and gradients ------------------------------------------------------------------------


def some_slow(quick, names):
    """Parameters of which all but the `quick` are slow: each takes seconds of compilation."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some_slow(("plain", "smoothing", "everything"), OPTIONS))
def test_float64_is_exact(name):
    with jax.enable_x64(True):
        x, labels, cts = problem(vocab_dim=OPTIONS[name].get("vocab_dim", 1))
        of = lambda f: jax.value_and_grad(partial(f, **OPTIONS[name]), has_aux=True)
        *each, true = once(lambda *a: [of(f)(*a) for f in (loss, kept, plain)], x, labels, cts)
        for found in each:
            close(found, true)


@pytest.mark.parametrize("dtype", some_slow(("bfloat16",), ["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_narrow_types_are_as_right_as_a_plain_program(name, dtype):
    options = OPTIONS[name]
    x, labels, cts = problem(dtype=dtype, vocab_dim=options.get("vocab_dim", 1))
    of = lambda f: jax.value_and_grad(partial(f, **options), has_aux=True)
    *each, judge = once(lambda *a: [of(f)(*a) for f in (loss, kept, plain)], x, labels, cts)
    truth = in_float64(of(plain), x, labels, cts)
    for (_, both), grads in each:
        assert [y.dtype for y in both] == [jnp.float32] * 2
        assert [g.dtype for g in grads] == [dtype] * 3
        assert_as_right_as((both, grads), (judge[0][1], judge[1]), (truth[0][1], truth[1]))


@pytest.mark.parametrize("dtype", some_slow(("float32",), ["float32", "bfloat16"]))
def test_a_model_that_is_sure_keeps_exact_gradients(dtype):
    """Where the label has nearly all of the probability, `p - 1` and `lse - x` would cancel."""
    (hidden, _, bias), labels, cts = problem(v=D, dtype=dtype)
    labels = jnp.maximum(labels, 0)
    hidden = (12 * jax.nn.one_hot(labels, D) + 0.1 * hidden).astype(dtype)
    x = hidden, jnp.eye(D, dtype=dtype), bias
    of = lambda f: jax.value_and_grad(f, has_aux=True)
    *each, judge = once(lambda *a: [of(f)(*a) for f in (loss, kept, plain)], x, labels, cts)
    truth = in_float64(of(plain), x, labels, cts)
    assert np.median(truth[0][1][0]) < 1e-3
    for (_, both), grads in each:
        assert_as_right_as((both, grads), (judge[0][1], judge[1]), (truth[0][1], truth[1]))
    tiny = in_float64(of(plain), (hidden * 2, *x[1:]), labels, cts)[0][1][0]
    twice = once(loss, (hidden * 2, *x[1:]), labels, cts)[1][0]
    assert np.median(tiny) < 1e-8, "below float32's rounding of the log-sum-exp"
    np.testing.assert_allclose(twice, tiny, rtol=1e-4)


def test_a_second_run_gives_the_same_bits_and_compiles_nothing():
    x, labels, cts = problem(dtype="bfloat16")
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    first, misses = run(x, labels, cts), []

    def listen(event: str, duration_secs: float, **_):
        misses.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    second = run(x, labels, cts)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not misses
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_every_chunking_gives_one_answer():
    with jax.enable_x64(True):
        x, labels, cts = problem()
        of = lambda chunks: jax.grad(partial(loss, chunks=chunks), has_aux=True)
        each = [of(chunks) for chunks in (None, Chunks((11, 256), (5, 256)))]
        close(*once(lambda *x: [f(*x) for f in each], x, labels, cts), rtol=1e-12)


# ---- Labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [loss, kept], ids=["made again", "kept"])
def test_ignored_tokens_have_no_influence_whatever_they_hold(loss):
    (hidden, *rest), labels, cts = problem(dtype="float32")
    run = partial(once, jax.value_and_grad(loss, has_aux=True))
    expected = run((hidden, *rest), labels, cts)
    for bad in (jnp.nan, jnp.inf):
        spoiled = jnp.where(labels[:, None] == -1, bad, hidden)
        jax.tree.map(np.testing.assert_array_equal, run((spoiled, *rest), labels, cts), expected)
    (_, both), grads = expected
    for y in (*both, grads[0]):
        assert not y[::5].any()
        assert y[1:5].all()


def test_labels_of_any_integer_type_and_no_dimension():
    x, labels, _ = problem(dtype="float32", v=200)
    entropy = lambda h, y: linear_cross_entropy(h, x[1], y, ignore_label=255)
    expected = once(entropy, x[0], jnp.where(labels == -1, 255, labels))
    small = np.where(labels == -1, 255, labels).astype(np.uint8)
    jax.tree.map(np.testing.assert_array_equal, once(entropy, x[0], small), expected)
    one = once(entropy, x[0][3], jnp.asarray(small[3]))
    assert [y.shape for y in one] == [(), ()]
    np.testing.assert_allclose(one, [y[3] for y in expected], rtol=1e-5)


def test_all_labels_ignored():
    x, labels, cts = problem(dtype="bfloat16")
    (value, both), grads = once(
        jax.value_and_grad(partial(loss, ignore_label=7, **OPTIONS["z-loss"]), has_aux=True),
        x, jnp.full_like(labels, 7), cts,
    )  # fmt: skip
    assert value == 0
    for y in jax.tree.leaves((both, grads)):
        assert not y.any()


@pytest.mark.parametrize("label", [V, V + 100, -2, 2**31 - 1])
def test_a_label_outside_the_vocabulary_is_nan(label):
    x, labels, cts = problem(dtype="float32")
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, (right, right_lse)), _ = run(x, labels, cts)
    (_, (found, lse)), (d_hidden, d_weight, _) = run(x, labels.at[3].set(label), cts)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]
    np.testing.assert_array_equal(np.delete(found, 3), np.delete(right, 3))
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)
    assert np.flatnonzero(np.isnan(d_hidden).any(-1)).tolist() == [3]
    assert np.isnan(d_weight).all()


@pytest.mark.parametrize(("t", "v"), [(0, 5), (1, 1), (5, 1), (1, 7), (3, 0), (0, 0)])
def test_few_or_no_tokens_and_entries(t, v):
    with jax.enable_x64(True):
        x, labels, cts = problem(t=t, v=v)
        run = lambda f: once(
            jax.value_and_grad(partial(f, z_loss=0.1 * (v > 0)), has_aux=True), x, labels, cts
        )
        found, true = run(loss), run(partial(loss, implementation="reference"))
        for y, z in zip(*map(jax.tree.leaves, (found[1], true[1])), strict=True):
            assert y.shape == z.shape
            if v:
                np.testing.assert_allclose(y, z, atol=1e-12)
        if v:
            jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), found[0], true[0])
        else:  # no label is an entry
            assert np.isnan(found[0][1][0][np.asarray(labels) != -1]).all()


# ---- Memory --------------------------------------------------------------------------------------


ALL = dict(softcap=30.0, label_smoothing=0.1, z_loss=1e-4, biased=True)


def large(softcap=None, label_smoothing=0.0, z_loss=0.0, biased=False, dtype="bfloat16"):
    """T = 8,192, V = 128,256, D = 4,096: shapes, a forward and a backward program."""
    struct = jax.ShapeDtypeStruct
    t, v, d = 8192, 128256, 4096
    args = [struct((t, d), dtype), struct((d, v), dtype), struct((t,), jnp.int32)]
    args += [struct((v,), jnp.float32)] * biased
    options: Any = dict(softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss)

    def mean(h, w, y, *bias):
        bias = bias[0] if bias else None
        return linear_cross_entropy(h, w, y, bias=bias, **options)[0].sum() / (y != -1).sum()

    moving = (0, 1, 3) if biased else (0, 1)
    return 4 * t * v, args, {"forward": mean, "backward": jax.value_and_grad(mean, moving)}


@pytest.mark.parametrize(
    ("target", "program", "options"),
    [
        ("cpu", "backward", ALL),
        ("H200", "forward", {}),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("cpu", "forward", ALL),
                ("cpu", "backward", {}),
                ("cpu", "backward", {"label_smoothing": 0.1}),
                ("cpu", "backward", {"softcap": 30.0, "label_smoothing": 0.1}),
                ("cpu", "backward", {"biased": True}),
                ("cpu", "backward", {"dtype": "float32", **ALL}),
                ("H200", "backward", {}),
                ("H200", "forward", ALL),
                ("H200", "backward", ALL),
                ("H200", "backward", {"biased": True}),
                ("H200", "backward", {"dtype": "float32", "label_smoothing": 0.1}),
                ("H200", "backward", {"dtype": "float32", "biased": True}),
                ("H200", "backward", {"dtype": "float32", **ALL}),
            )
        ],
    ],
    ids=lambda x: " ".join(map(str, x.items())) if isinstance(x, dict) else x,
)
def test_logits_never_exist_whole(target, program, options):
    dense, args, programs = large(**options)
    if target == "cpu":
        compiled = jax.jit(programs[program]).lower(*args).compile()
    else:
        pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
        compiled = compile_for(target, programs[program], *args)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * dense


# ---- Errors --------------------------------------------------------------------------------------


def call(
    h=(4, 3), w=(3, 9), y=(4,), dtype="float32", w_dtype=None, y_dtype="int32", **options: Any
):  # fmt: skip
    if (bias := options.pop("bias", None)) is not None:
        options["bias"] = jnp.ones(bias)
    return linear_cross_entropy(
        jnp.ones(h, dtype), jnp.ones(w, w_dtype or dtype), jnp.ones(y, y_dtype), **options
    )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(w=(9, 3)), r"`hidden` has 3 numbers per token and `weight`, \(9, 3\), 9 per entry: "
         r"for weights \[V, D\] say `vocab_dim=0`"),
        (dict(w=(5, 9)), r"5 per entry\."),
        (dict(w=(3, 9, 1)), r"`weight` \(3, 9, 1\); needed are \[..., D\] and \[D, V\]"),
        (dict(y=(5,)), r"`labels` has shape \(5,\); needed is one per token, \(4,\)"),
        (dict(y_dtype="float32"), r"`labels` has dtype float32; needed is an integer"),
        (dict(w_dtype="bfloat16"), r"`hidden` is float32 and `weight` bfloat16; .* cast them"),
        (dict(bias=(3,)), r"`bias` is float32\[3\]; needed is one float per entry, \[9\]"),
        (dict(vocab_dim=2), r"`vocab_dim` is 2; needed is 1"),
        (dict(vocab_axis="tp"), r"`vocab_axis` is 'tp' and `weight` does not vary over it"),
        (dict(implementation="fast"), r"`implementation` is 'fast'; there is"),
        (dict(softcap=0), r"`softcap` is 0; needed is a positive number"),
        (dict(softcap=True), r"`softcap` is True; needed is a positive number"),
        (dict(softcap="a"), r"`softcap` is 'a'; needed is a positive number"),
        (dict(ignore_label=0.5), r"`ignore_label` is 0.5; needed is an integer of 32 bits"),
        (dict(ignore_label=2**40), r"`ignore_label` is 1099511627776; needed is an integer of 32"),
        (dict(ignore_label=np.nan), r"`ignore_label` is nan; needed"),
        (dict(vocab_dim=True, z_loss=None), r"`z_loss` is None; .*`vocab_dim` is True; needed is"),
        (dict(vocab_axis=["tp"]), r"`vocab_axis` is \['tp'\] and `weight` does not vary over it"),
        (dict(dtype="float8_e4m3fn"), r"`hidden` is float8_e4m3fn .* needed is one of bfloat16"),
        (dict(label_smoothing=2), r"`label_smoothing` is 2; needed is a number from 0 to 1"),
        (dict(z_loss=-1), r"`z_loss` is -1; needed is a number not below 0"),
        (dict(y=(5,), y_dtype="float32"), r"shape \(5,\).*; `labels` has dtype float32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_that_says_so(unchecked, wrong, match):
    with pytest.raises(ValueError, match=match):
        call(**wrong)


@pytest.mark.parametrize("pair", [(0, 8), (8, -1), (8.0, 8), (True, 8), (8,), 8, None, [8, 8]])
def test_chunks_are_positive_integers(pair, unchecked):
    found = re.escape(f"`by_entry` is {pair!r}; needed is a tuple of two positive integers")
    with pytest.raises(ValueError, match=found):
        Chunks((8, 8), pair)


def test_chunks_beyond_an_array_take_all_of_it():
    x, labels, cts = problem(dtype="float32")
    most = Chunks((2**40, 2**40), (2**40, 2**40))
    both = once(lambda *a: [loss(*a, chunks=c)[1] for c in (most, SMALL)], x, labels, cts)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *both)


def test_what_is_no_array_is_an_error_that_names_all(unchecked):
    match = "`hidden` is of type list; .*`labels` is of type NoneType; .*`chunks` is 8; needed"
    call: Any = linear_cross_entropy
    with pytest.raises(TypeError, match=match):
        call([[1.0]], jnp.ones((1, 3)), None, chunks=8)


def test_kept_logits_are_three_products_and_one_array_of_their_size():
    x, labels, cts = problem(dtype="bfloat16")
    f = lambda x: kept(x, labels, cts, softcap=3.0, label_smoothing=0.1)[0]
    jaxpr = trace(jax.grad(f), x)
    products = [e for e in walk(jaxpr) if e.eqn.primitive.name == "dot_general"]
    assert len([p for p in products if _multiplications(p.eqn) == T * D * V]) == 3
    _, residuals = jax.vjp(f, x)
    sizes = [r for r in jax.tree.leaves(residuals) if r.size == T * V]
    assert [r.dtype for r in sizes] == [jnp.bfloat16]


def _multiplications(eqn) -> int:
    x, y = (v.aval.shape for v in eqn.invars)
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    return int(np.prod(x) * np.prod(y) / np.prod([x[d] for d in contracted]))


def test_what_kept_logits_do_without_is_an_error(unchecked):
    x, labels, cts = problem(dtype="float32")
    match = r"`chunks` is .* `implementation` is 'chunked'"
    with pytest.raises(ValueError, match=match):
        loss(x, labels, cts, implementation="chunked", keep_logits=True)
    with pytest.raises(TypeError, match="`keep_logits` is 1; needed is True or False"):
        loss(x, labels, cts, chunks=None, keep_logits=1)


def test_kernels_take_no_chunks():
    with pytest.raises(NotImplementedError, match="`chunks` are given, which kernels have not"):
        call((8, 64), (64, 64), (8,), "bfloat16", chunks=SMALL, implementation="mosaic_gpu")


def test_a_traced_number_is_an_error(unchecked):
    with pytest.raises(ValueError, match="`z_loss` is traced"):
        jax.jit(lambda z: call(z_loss=z))(0.1)


def test_the_program_holds_one_primitive_and_its_tile_sum():
    x, labels, cts = problem(dtype="float32")
    names = lambda f: [s.eqn.primitive.name for s in walk(trace(f, x, labels, cts))]
    found = names(jax.grad(lambda *a: loss(*a)[0]))
    assert found.count("linear_cross_entropy") == found.count("loss_sum") == 1
    assert not {"scan", "while"} & set(found)


def test_labels_without_a_sign_are_never_the_one_that_is_ignored():
    h, w = jnp.ones((2, 4)), jnp.ones((4, 5))
    loss, _ = linear_cross_entropy(h, w, jnp.array([2**32 - 1, 1], jnp.uint32))
    assert np.isnan(loss[0])
    assert np.isfinite(loss[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"softcap": np.inf}, "`softcap` is inf"), ({"z_loss": np.inf}, "`z_loss` is inf")],
    ids=["softcap", "z_loss"],
)
def test_numbers_must_be_finite(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(jnp.ones((1, 4)), jnp.ones((4, 5)), jnp.array([1]), **options)


def test_a_token_has_at_least_one_number():
    with pytest.raises(ValueError, match=r"shape \(3, 0\); needed is at least one number"):
        linear_cross_entropy(jnp.ones((3, 0)), jnp.ones((0, 7)), jnp.array([1, 1, 1]))
