"""A program in a policy's dtypes: where casts stand, what stays float32, and how close it is."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import llama
from tests.oracle import once
from xform import Policy, causal, flex_attention, linear_cross_entropy, precision
from xform.jaxpr import trace, walk
from xform.numerics import lint
from xform.sharding import make_mesh
from xform.train.data import Rows

NARROW = ("bf16", "f16")
EPS = {"bf16": 2.0**-8, "f16": 2.0**-11}


def random(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def layers(ws, x):
    def step(x, w):
        return x + jax.nn.silu(x @ w) * 0.5, None

    return lax.scan(step, x, ws)[0]


def loss(ws, x):
    return jnp.mean(layers(ws, x) ** 2)


WS, X = random(5, 16, 16, scale=0.25), random(4, 16, seed=1)


def of(var) -> Any:
    return var.aval


def where(program, *names):
    """Path and result dtype of each equation of these primitives."""
    return [
        (site.path, of(site.eqn.outvars[0]).dtype.name)
        for site in walk(program)
        if site.eqn.primitive.name in names
    ]


def test_casts_stand_inside_of_the_scan():
    """No second copy of all parameters is made: each layer casts its own."""
    program = trace(precision(loss, "bf16"), WS, X)
    casts = [
        site
        for site in walk(program)
        if site.eqn.primitive.name == "convert_element_type"
        and of(site.eqn.invars[0]).shape[-2:] == (16, 16)
    ]
    assert [site.path[0][0] for site in casts] == ["scan"]
    assert where(program, "dot_general") == [((("scan", "jaxpr"),), "bfloat16")]
    backward = trace(jax.grad(precision(loss, "bf16")), WS, X)
    assert {dtype for _, dtype in where(backward, "dot_general")} == {"bfloat16"}
    assert not [
        site for site in walk(backward)
        if site.depth == 0 and of(site.eqn.outvars[0]).shape == (5, 16, 16)
        and of(site.eqn.outvars[0]).dtype == jnp.bfloat16
    ]  # fmt: skip


@pytest.mark.parametrize("policy", NARROW)
def test_values_and_float32_gradients(policy):
    want = jax.value_and_grad(loss)(WS, X)
    got = jax.jit(jax.value_and_grad(precision(loss, policy)))(WS, X)
    assert got[0].dtype == got[1].dtype == jnp.float32
    for g, w in zip(got, want, strict=True):
        error = jnp.linalg.norm(g - w) / jnp.linalg.norm(w)
        assert 0 < error < 4 * EPS[policy]


def test_lines_and_scopes_stay_those_of_the_user():
    def f(w, x):
        with jax.named_scope("block"):
            return lax.scan(lambda x, w: (x @ w, None), x, w)[0].sum()

    for g in (f, jax.grad(f)):
        sites = list(walk(trace(precision(g, "bf16"), WS, X)))
        first = f.__code__.co_firstlineno
        lines = {site.line for site in sites} - {"unknown"}  # of casts of results
        assert {line.split(" ")[0] for line in lines} == {f"{__file__}:{first + 2}"}
        scans = [site for site in sites if site.eqn.primitive.name == "scan"]
        assert all("block" in str(site.eqn.source_info.name_stack) for site in scans)
        assert scans


def test_sums_and_exponentials_are_wide():
    f = lambda w, x: jax.nn.softmax(x @ w).sum(0)
    program = trace(precision(f, "bf16"), WS[0], X)
    assert {d for _, d in where(program, "exp", "reduce_sum")} == {"float32"}
    assert where(program, "dot_general", "sub") == [((), "bfloat16")] * 2
    ones = jnp.ones((1, 4096))
    total = precision(lambda x, w: jnp.sum(x @ w), "bf16")
    assert total(ones, jnp.eye(4096)) == 4096
    assert precision(lambda x, w: x @ w, "bf16")(ones, jnp.ones((4096, 1))) == 4096


def test_constants_stay_exact_until_they_meet_a_product():
    """Positions of a rotary embedding, which bfloat16 could not count."""
    f = lambda x, w: x @ w * jnp.cos(jnp.arange(4097.0))[-1]
    got = precision(f, "bf16")(jnp.ones((1, 1)), jnp.ones((1, 1)))
    assert abs(got[0, 0] - np.cos(4096)) < 2**-8
    assert precision(lambda n: n + 1, "bf16")(jnp.float32(4096)) == 4097


@pytest.mark.parametrize(
    "enclose",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)),
        lambda f: lambda w, x: lax.cond(x[0, 0] > 99, lambda w, x: x * 1.0, f, w, x),
        lambda f: lambda w, x: lax.fori_loop(0, 1, lambda i, x: f(w, x), x),
        lambda f: lambda w, x: jax.vmap(lambda x: f(w, x[None])[0])(x),
        lambda f: jax.custom_jvp(f),
    ],
    ids=["jit", "remat", "policy", "cond", "fori", "vmap", "custom_jvp"],
)
def test_products_are_narrow_in_all_that_encloses_them(enclose):
    f = lambda w, x: jnp.tanh(x @ w)
    g = enclose(f)
    if isinstance(g, jax.custom_jvp):
        g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    narrow = precision(g, "bf16")
    program = trace(narrow, WS[0], X)
    assert {d for _, d in where(program, "dot_general")} == {"bfloat16"}
    got, want = jax.jit(narrow)(WS[0], X), f(WS[0], X)
    assert got.dtype == jnp.float32
    assert 0 < jnp.abs(got - want).max() < 3 * EPS["bf16"]
    for transform in (jax.grad, lambda f: lambda *a: jax.jvp(f, a, a)[1]):
        scalar = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)
        got = transform(scalar(narrow))(WS[0], X)
        want = transform(scalar(f))(WS[0], X)
        assert jnp.linalg.norm(got - want) < 0.03 * jnp.linalg.norm(want)


def test_a_custom_vjp_keeps_its_rule():
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, ct: (7.0 * (r[1].T @ ct), ct @ r[0].T))
    program = jax.grad(lambda w, x: precision(f, "bf16")(w, x).sum())
    got, want = program(WS[0], X), 7.0 * jnp.outer(X.sum(0), jnp.ones(16))
    assert got.dtype == jnp.float32
    assert 0 < jnp.linalg.norm(got - want) < EPS["bf16"] * jnp.linalg.norm(want)
    assert {d for _, d in where(trace(program, WS[0], X), "dot_general")} == {"bfloat16"}


def test_our_primitives_become_those_of_the_narrow_dtype():
    def f(w, x, unembed, bias):
        q = (x @ w).reshape(2, 8, 2, 8)
        score = lambda s, b, h, i, j: s + bias[h] * (i - j)
        out = flex_attention(q, q, q, score_mod=score, mask_mod=causal()).reshape(2, 8, 16)
        labels = jnp.arange(16).reshape(2, 8)
        return linear_cross_entropy(out, unembed, labels)[0].mean()

    args = random(16, 16, scale=0.25), random(2, 8, 16, seed=3), random(16, 32, seed=4), jnp.ones(2)
    program = trace(precision(f, "bf16"), *args)
    attention, entropy = (
        next(site.eqn for site in walk(program) if site.eqn.primitive.name == name)
        for name in ("flex_attention", "linear_cross_entropy")
    )
    assert [of(v).dtype.name for v in attention.invars[:3]] == ["bfloat16"] * 3
    assert [of(v).dtype.name for v in attention.outvars] == ["bfloat16", "float32", "float32"]
    assert [of(v).dtype.name for v in entropy.invars[:2]] == ["bfloat16"] * 2
    every = tuple(range(4))
    want, wants = once(jax.value_and_grad(f, argnums=every), *args)
    got, gots = once(jax.value_and_grad(precision(f, "bf16"), argnums=every), *args)
    assert abs(got - want) < 0.02 * want
    for g, w in zip(gots, wants, strict=True):
        assert g.dtype == jnp.float32
        assert jnp.linalg.norm(g - w) < 0.05 * jnp.linalg.norm(w)


def test_other_dtypes_are_left_as_they_are_written():
    f = lambda n, h, x: (n + 1, h * 2, (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T))
    n, h = jnp.arange(3), jnp.ones(3, jnp.float16)
    got = precision(f, "bf16")(n, h, X)
    want = f(n, h, X)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_each_dtype_of_a_policy():
    program = lambda **dtypes: trace(precision(loss, Policy(**dtypes)), WS, X)
    assert of(program(output="bfloat16").outvars[0]).dtype == jnp.bfloat16
    assert of(program(compute="float16").outvars[0]).dtype == jnp.float32
    assert {d for _, d in where(program(compute="float16"), "dot_general")} == {"float16"}
    assert {d for _, d in where(program(accumulate="bfloat16"), "integer_pow")} == {"bfloat16"}
    stored = program(params="bfloat16")
    first = next(site for site in walk(stored) if of(site.eqn.outvars[0]).shape == (5, 16, 16))
    assert (first.depth, of(first.eqn.outvars[0]).dtype) == (0, jnp.bfloat16)
    exact = precision(loss, "f32")(WS, X)
    assert exact == loss(WS, X)


@pytest.mark.parametrize("dtypes", [{"params": "bfloat16"}, {"accumulate": "bfloat16"}])
def test_rounded_arguments_and_narrow_sums_meet_all_others(dtypes):
    """Constants, casts, carried values, branches and layer norms have dtypes of their own."""

    def f(w, x):
        h = (x + jnp.ones((1, 16))) @ w
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        h = jnp.where(x > 0, h, x) + h.astype(jnp.float16).astype(jnp.float32) + jnp.exp(h)
        h, total = lax.scan(lambda c, _: (c * 0.5 + jnp.exp(c).sum(), c), h, None, length=2)
        x = lax.cond(x.sum() > 0, lambda x: x, jnp.zeros_like, x)
        return jnp.mean(jnp.clip(h, -1, x)) + total.sum()

    out, grads = jax.eval_shape(jax.value_and_grad(precision(f, Policy(**dtypes))), WS[0], X)
    assert out.dtype == grads.dtype == jnp.float32


def test_complex_numbers_are_made_of_float32():
    f = lambda w, x: jnp.sum(jnp.abs(lax.complex(x @ w, 2 * x)))
    got = jax.value_and_grad(precision(f, "bf16"))(WS[0], X)
    for a, b in zip(got, jax.value_and_grad(f)(WS[0], X), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_are_summed_over_devices_in_reduce(reduce):
    mesh = make_mesh(dp=4, tp=2)

    def shard(w, x):
        y = lax.psum(x @ w, "tp")  # rows of w are split
        return lax.psum(jnp.sum(jnp.tanh(y)), "dp")

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("tp"), P("dp", "tp")), out_specs=P())
    f = precision(sharded, Policy(reduce=reduce))
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    args = place(WS[0], P("tp")), place(random(8, 16, seed=2), P("dp", "tp"))
    sums = [
        of(site.eqn.invars[0])
        for site in walk(trace(jax.grad(f), *args))
        if "psum" in site.eqn.primitive.name and of(site.eqn.invars[0]).ndim
    ]
    assert len(sums) == 2  # of y, and of the gradient of w over dp
    assert sums[0].dtype == reduce
    assert sums[1].dtype == jnp.float32  # master gradients, whatever the policy
    want = jax.jit(jax.grad(sharded))(*args)
    got = jax.jit(jax.grad(f))(*args)
    assert jnp.linalg.norm(got - want) < 0.03 * jnp.linalg.norm(want)


def test_it_makes_no_hazard_of_a_softmax():
    """Its scores have two readers, and are rounded once for both."""
    f = lambda q, k: jax.nn.softmax(q @ k * 30.0)
    q, k = random(64, 64), random(64, 256, seed=1)
    narrow = precision(f, "bf16")
    assert not lint(narrow)(q, k)
    z = (q.astype(jnp.bfloat16) @ k.astype(jnp.bfloat16)) * jnp.bfloat16(30)
    e = np.exp(np.asarray(z, np.float64) - np.asarray(z, np.float64).max(-1, keepdims=True))
    # The subtraction itself is in bfloat16.
    assert np.abs(jax.jit(narrow)(q, k) - e / e.sum(-1, keepdims=True)).max() < 2**-7


@pytest.fixture(scope="module")
def model():
    config = llama.Config(layers=2, width=32, heads=4, kv_heads=2, head_size=8, hidden=64)
    params = once(partial(llama.init, config), jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)
    rows = Rows(tokens, np.zeros_like(tokens), np.roll(tokens, -1, 1))
    return lambda params, rows: llama.loss(params, rows, config)[0], params, rows


def test_the_example_model(model):
    with jax.numpy_rank_promotion("allow"):
        f, params, rows = model
        narrow = precision(f, "bf16")
        assert not lint(narrow)(params, rows)
        (want, wants) = once(jax.value_and_grad(f), params, rows)
        (got, gots) = once(jax.value_and_grad(narrow), params, rows)
    assert abs(got - want) < 1e-3 * want
    for g, w in zip(jax.tree.leaves(gots), jax.tree.leaves(wants), strict=True):
        assert g.dtype == jnp.float32
        assert jnp.linalg.norm(g - w) < 0.06 * jnp.linalg.norm(w)


def test_a_gradient_that_is_already_taken():
    narrow = precision(jax.grad(jax.checkpoint(loss)), "bf16")
    got, want = jax.jit(narrow)(WS, X), jax.grad(loss)(WS, X)
    assert got.dtype == jnp.float32
    assert {d for _, d in where(trace(narrow, WS, X), "dot_general")} == {"bfloat16"}
    assert jnp.linalg.norm(got - want) < 0.03 * jnp.linalg.norm(want)


def test_policies_are_checked():
    with pytest.raises(ValueError, match="`policy` is 'fp16'; needed is a `Policy`, or one of f32"):
        precision(loss, "fp16")
    with pytest.raises(ValueError, match=r"`compute` is 'float8_e4m3fn'.*`reduce` is 'int8'"):
        Policy(compute="float8_e4m3fn", reduce="int8")
