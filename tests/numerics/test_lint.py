"""Each hazard: `lint` names it at its line, the fault shows under jit, and the cure mends it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import flex_attention
from xform.numerics import lint, single
from xform.sharding import make_mesh


def rules(f, *args) -> list[str]:
    return [finding.rule for finding in lint(f)(*args).findings]


def random(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), dtype)


def exact(z):
    """Softmax in float64 of what an array holds."""
    z = np.asarray(z).astype(np.float64)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- split rounding ------------------------------------------------------------------------------


def by_hand(x, c, keep):
    z = keep(x * c)
    m = z.max(-1, keepdims=True)
    e = jnp.exp(z.astype(jnp.float32) - m.astype(jnp.float32))
    return e / e.sum(-1, keepdims=True)


def by_jax(x, c, keep):
    return jax.nn.softmax(keep(x * c).astype(jnp.float32))


def by_log(x, c, keep):
    return jnp.exp(jax.nn.log_softmax(keep(x * c).astype(jnp.float32)))


@pytest.mark.parametrize("softmax", [by_hand, by_jax, by_log])
def test_a_rounded_value_by_two_routes(softmax):
    x, c = random(64, 256), jnp.bfloat16(333)
    broken, cured = (jax.jit(lambda x, keep=k: softmax(x, c, keep)) for k in (lambda z: z, single))
    (finding,) = lint(broken)(x).findings
    assert (finding.rule, finding.sure) == ("split rounding", True)
    assert "xf.numerics.single" in finding.cure
    assert not lint(cured)(x)
    want = exact(np.asarray(x * c))
    if jax.default_backend() == "cpu":  # where XLA does it today
        assert np.abs(broken(x) - want).max() > 0.2
    assert np.abs(cured(x) - want).max() < 1e-5


def test_it_makes_nan_of_large_scores():
    x, c = random(64, 256), jnp.bfloat16(3e5)
    if jax.default_backend() == "cpu":
        assert np.isnan(jax.jit(lambda x: by_hand(x, c, lambda z: z))(x)).any()
    cured = jax.jit(lambda x: by_hand(x, c, single))(x)
    assert np.abs(cured - exact(np.asarray(x * c))).max() < 1e-5


def test_a_contracted_product_is_a_risk():
    """`softmax(q k / sqrt d) v` at float32: NaN of scores of 1e10 on some devices and versions."""

    def attend(q, keep):
        return jax.nn.softmax(keep(q @ q.T * np.float32(5**-0.5)), axis=-1) @ q

    q = random(16, 16, dtype=jnp.float32) * 1e5
    (finding,) = lint(lambda q: attend(q, lambda z: z))(q).findings
    assert (finding.rule, finding.sure) == ("split rounding", False)
    assert not lint(lambda q: attend(q, single))(q)
    assert np.isfinite(jax.jit(lambda q: attend(q, single))(q)).all()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.nn.softmax(x),
        lambda x: jax.nn.softmax(x.astype(jnp.float32)),
        lambda x: jnp.exp(x - jnp.max(x * 2)),
        lambda x: flex_attention(x, x, x),
    ],
    ids=["argument", "widened", "another", "fused"],
)
def test_what_is_read_as_it_is_stored_is_fine(f):
    assert "split rounding" not in rules(f, random(2, 8, 4, 16))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_single_keeps_every_number(name):
    dtype = getattr(jnp, name)
    every = np.arange(2 ** (8 * dtype.dtype.itemsize), dtype=f"uint{8 * dtype.dtype.itemsize}")
    x = lax.bitcast_convert_type(every, dtype)
    got = jax.jit(single)(x).astype(jnp.float32)
    np.testing.assert_array_equal(got, x.astype(jnp.float32))


def test_single_has_derivatives_and_batches():
    f = lambda x: jnp.sum(single(x * 3) ** 2)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray([1.0, 2.0], dtype)
        np.testing.assert_array_equal(jax.grad(f)(x), jnp.asarray([18.0, 36.0], dtype))
        np.testing.assert_array_equal(jax.vmap(single)(x), x)


# ---- the error of a sum --------------------------------------------------------------------------


def test_the_error_of_a_rounded_sum():
    x, y = random(1024), random(1024, seed=1) * jnp.bfloat16(0.01)

    def error(x, y, keep):
        r = keep(x + y)
        return y.astype(jnp.float32) - (r.astype(jnp.float32) - x.astype(jnp.float32))

    broken, cured = (jax.jit(lambda x, y, k=k: error(x, y, k)) for k in (lambda r: r, single))
    assert rules(broken, x, y) == ["lost remainder"]
    assert not lint(cured)(x, y)
    wide = lambda x: np.asarray(x).astype(np.float64)
    want = wide(y) - (wide(x + y) - wide(x))
    if jax.default_backend() == "cpu":
        assert np.abs(broken(x, y)).max() < 1e-6 < np.abs(want).max()
    np.testing.assert_allclose(cured(x, y), want, atol=1e-7)
    in_bf16 = lambda x, y: y - ((x + y) - x)
    assert rules(in_bf16, x, y) == ["lost remainder"]


# ---- cancellation --------------------------------------------------------------------------------


def test_the_variance():
    x = jnp.asarray(1e4 + np.random.default_rng(0).normal(size=1000), jnp.float32)
    cancelled = lambda x: (x**2).mean() - x.mean() ** 2
    other = lambda x: jnp.mean(x * x, axis=0) - jnp.square(jnp.sum(x, axis=0) / 1000)
    unbiased = lambda x: (jnp.sum(x**2) - jnp.sum(x) ** 2 / 1000) / 999
    negated = lambda x: -(x.mean() ** 2) + (x * x).mean()
    for f in (cancelled, other, unbiased, negated):
        assert rules(f, x) == ["cancelled variance"]
    want = np.asarray(x).astype(np.float64).var()
    assert abs(jax.jit(cancelled)(x) - want) > 0.1 * want
    assert not lint(jnp.var)(x)
    assert abs(jax.jit(jnp.var)(x) - want) < 1e-4 * want
    assert not lint(lambda x: (x**2).mean() - jnp.mean(x + 1) ** 2)(x)


def test_log_of_softmax():
    x = jnp.array([0.0, 200.0])
    broken = lambda x: jnp.log(jax.nn.softmax(x))
    padded = lambda x: jnp.log(jax.nn.softmax(x) + 1e-9)
    assert rules(broken, x) == rules(padded, x) == ["log of softmax"]
    assert jax.jit(broken)(x)[0] == -np.inf
    label = jnp.array([0])
    picked = (
        lambda x: -jnp.log(jax.nn.softmax(x)[0]),
        lambda x: -jnp.log(jnp.take_along_axis(jax.nn.softmax(x), label, 0)),
        lambda x: jnp.log(jnp.clip(jax.nn.softmax(x), 1e-7, 1.0)),
    )
    assert all(rules(f, x) == ["log of softmax"] for f in picked)
    assert not lint(jax.nn.log_softmax)(x)
    assert not lint(lambda x: jnp.log(1 + jax.nn.softmax(x)))(x)
    assert jax.jit(jax.nn.log_softmax)(x)[0] == -200


# ---- narrow sums ---------------------------------------------------------------------------------


def test_a_carried_sum():
    def total(xs, dtype):
        return lax.scan(lambda c, x: (c + x.astype(dtype), None), jnp.zeros((), dtype), xs)[0]

    ones = jnp.ones(4096, jnp.bfloat16)
    broken, cured = (jax.jit(lambda xs, d=d: total(xs, d)) for d in (jnp.bfloat16, jnp.float32))
    assert rules(broken, ones) == ["narrow sum"]
    assert broken(ones) == 256
    assert not lint(cured)(ones)
    assert cured(ones) == 4096
    assert not lint(broken)(ones[:16])


def test_a_sum_carried_by_a_while():
    def total(xs, dtype):
        step = lambda c: (c[0] + 1, c[1] + xs[c[0]].astype(dtype))
        return lax.while_loop(lambda c: c[0] < len(xs), step, (0, jnp.zeros((), dtype)))[1]

    ones = jnp.ones(4096, jnp.bfloat16)
    (finding,) = lint(lambda xs: total(xs, jnp.bfloat16))(ones).findings
    assert (finding.rule, finding.sure) == ("narrow sum", False)
    assert not lint(lambda xs: total(xs, jnp.float32))(ones)


def test_a_scattered_sum():
    def total(xs, dtype):
        return jnp.zeros(2, dtype).at[jnp.zeros(len(xs), int)].add(xs.astype(dtype))[0]

    ones = jnp.ones(4096, jnp.bfloat16)
    broken, cured = (jax.jit(lambda xs, d=d: total(xs, d)) for d in (jnp.bfloat16, jnp.float32))
    assert rules(broken, ones) == ["narrow sum"]
    assert broken(ones) == 256
    assert not lint(cured)(ones)
    assert cured(ones) == 4096


@pytest.mark.parametrize(
    "f", [lambda x: lax.reduce_sum(x, (0,)), jnp.cumsum], ids=["reduce_sum", "cumsum"]
)
def test_sums_in_16_bits_are_named(f):
    """XLA's CPU code happens to add them up in float32."""
    assert rules(f, random(4096)) == ["narrow sum"]
    assert not lint(jnp.sum)(random(4096))
    assert not lint(f)(random(4096, dtype=jnp.float32))
    assert not lint(f)(random(8))


def test_a_sum_over_devices():
    mesh = make_mesh(dp=8)
    x = random(8, 256)

    def over_devices(cast):
        f = jax.shard_map(
            lambda x: lax.psum(cast(x), "dp").astype(jnp.float32),
            mesh=mesh, in_specs=P("dp"), out_specs=P(),
        )  # fmt: skip
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("dp")))
        return [x.rule for x in lint(f)(placed).findings], jax.jit(f)(placed)

    want = np.asarray(x).astype(np.float64).sum(0, keepdims=True)
    found, broken = over_devices(lambda x: x)
    assert found == ["narrow sum"]
    assert np.abs(broken - want).max() > 1e-3
    found, cured = over_devices(lambda x: x.astype(jnp.float32))
    assert not found
    assert np.abs(cured - want).max() < 1e-6


# ---- range and masks -----------------------------------------------------------------------------


def test_integers_too_large_for_half_precision():
    n = jnp.array([7, 70_000])
    broken = lambda n: n.astype(jnp.float16) * 2
    assert rules(broken, n) == ["integer overflow"]
    assert jax.jit(broken)(n)[1] == np.inf
    cured = lambda n: n.astype(jnp.float32) * 2
    assert not lint(cured)(n)
    assert jax.jit(cured)(n)[1] == 140_000
    small = (
        lambda n: jnp.clip(n, 0, 100).astype(jnp.float16),
        lambda n: jnp.arange(1000).astype(jnp.float16),
        lambda n: n.astype(jnp.int8).astype(jnp.float16),
        lambda n: (n > 3).astype(jnp.float16),
        lambda n: (n % 7 * 100).astype(jnp.float16),
        lambda n: n.astype(jnp.float32).astype(jnp.int8).astype(jnp.float16),
    )
    assert rules(lambda n: n.astype(jnp.float32).astype(jnp.float16), n) == ["integer overflow"]
    assert not any(lint(f)(n) for f in small)
    assert rules(lambda: jnp.arange(70_000).astype(jnp.float16)) == ["integer overflow"]


@pytest.mark.parametrize("op", [jnp.sqrt, jnp.log, lambda x: 1 / x], ids=["sqrt", "log", "div"])
def test_a_mask_after_the_operation(op):
    x = jnp.array([0.0, 1.0])
    late = lambda x: jnp.where(x > 0, op(x), 0.0).sum()
    early = lambda x: jnp.where(x > 0, op(jnp.where(x > 0, x, 1)), 0.0).sum()
    assert rules(late, x) == ["masked too late"]
    assert np.isnan(jax.jit(jax.grad(late))(x)[0])
    assert not lint(early)(x)
    assert np.isfinite(jax.jit(jax.grad(early))(x)).all()
    # A mask of something else guards nothing.
    assert not lint(lambda x, y: jnp.where(y > 0, op(x), 0.0))(x, x)


def test_it_looks_into_loops_branches_and_gradients_and_names_the_line():
    def body(x, _):
        return lax.cond(x[0, 0] > 0, lambda x: x, bad_softmax, x), None

    def bad_softmax(x):
        return jax.nn.softmax((x * jnp.bfloat16(3)).astype(jnp.float32)).astype(jnp.bfloat16)

    f = lambda x: lax.scan(jax.checkpoint(body), x, None, length=3)[0]
    report = lint(f)(random(4, 8))
    line = bad_softmax.__code__.co_firstlineno + 1
    assert [x.rule for x in report.findings] == ["split rounding"]
    assert f"{__file__}:{line}" in str(report)
    g = jax.grad(lambda x: f(x).astype(jnp.float32).sum())
    assert "split rounding" in rules(g, random(4, 8))


def test_it_runs_on_shapes_alone():
    assert str(lint(jnp.var)(jax.ShapeDtypeStruct((2**40,), jnp.float32))) == "no hazard found"
