"""Products of numbers of 8 and 4 bits, forward and backward, against those of the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import FORMATS, Policy, Products, precision, quantise
from xform.jaxpr import trace, walk
from xform.sharding import make_mesh

PAIRS = [("e4m3", "e5m2"), ("mxfp8", "mxfp8_e5m2"), ("mxfp4", "mxfp8_e5m2"), ("nvfp4", "nvfp4"),
         ("e4m3", None), (None, "e5m2"), ("nvfp4", None), ("mxfp4", "e5m2")]  # fmt: skip
ids = "{0[0]}-{0[1]}".format


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rounded(x, format, dim):
    """A float64 array of what a format leaves of `x`; without one, of bfloat16."""
    if format is None:
        return np.asarray(x.astype(jnp.bfloat16)).astype(np.float64)
    q = quantise(x.astype(jnp.float32), format, dim=dim)
    return np.asarray(q.dequantise()).astype(np.float64)


def policy(pair, **options):
    return Policy(products=Products(*pair, **options))


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_forward_and_both_backward_products(pair):
    x, y, ct = random(8, 48), random(48, 64, seed=1), random(8, 64, seed=2)
    f = precision(lambda x, y: x @ y, policy(pair))
    out, pull = jax.vjp(jax.jit(f), x, y)
    dx, dy = pull(ct)
    forward, backward = pair
    # Where the backward pass has no format, it reads the operands in bfloat16.
    again = None if backward is None else forward
    half = 2.0**-8
    close = lambda got, want: np.testing.assert_allclose(got, want, atol=half * np.abs(want).max())
    close(out, rounded(x, forward, 1) @ rounded(y, forward, 0))
    ct = ct.astype(jnp.bfloat16)
    close(dx, rounded(ct, backward, 1) @ rounded(y, again, 1).T)
    close(dy, rounded(x, again, 0).T @ rounded(ct, backward, 0))
    assert dx.dtype == dy.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    assert (np.abs(out - exact).max() > half * np.abs(exact).max()) == (forward is not None)


def test_elements_of_8_bits_are_what_is_multiplied():
    """And what is kept for the backward pass."""
    f = precision(lambda x, y: jnp.sum(x @ y), "fp8")
    program = trace(jax.grad(f, argnums=(0, 1)), random(8, 32), random(32, 16))
    found = [
        tuple(jnp.result_type(v.aval).name for v in site.eqn.invars)
        for site in walk(program)
        if site.eqn.primitive.name == "dot_general"
    ]
    e4, e5 = "float8_e4m3fn", "float8_e5m2"
    assert found[0] == (e4, e4)
    assert sorted(map(set, found[1:]), key=str) == [{e4, e5}] * 2


@pytest.mark.parametrize(
    "einsum", ["bij,bjk->bik", "bij,kj->bik", "abij,bajk->abik", "ij,i->j", "ijk,kjl->il", "i,i->"]
)
def test_any_dimension_numbers(einsum):
    sizes = dict(a=2, b=3, i=8, j=16, k=4, l=5)
    left, right = einsum.split("->")[0].split(",")
    x, y = (random(*(sizes[c] for c in s), seed=n) for n, s in enumerate((left, right)))
    exact = lambda x, y: jnp.sum(jnp.einsum(einsum, x, y) ** 2)
    wants = jax.grad(exact, argnums=(0, 1))(x, y)
    for name in ("fp8", "mxfp8"):
        gots = jax.grad(precision(exact, name), argnums=(0, 1))(x, y)
        for got, want in zip(gots, wants, strict=True):
            assert got.shape == want.shape
            cosine = jnp.vdot(got, want) / jnp.linalg.norm(got) / jnp.linalg.norm(want)
            assert cosine > 0.93


# ---- delayed scales ------------------------------------------------------------------------------


def step(f, state, *args):
    return jax.jit(jax.grad(f, argnums=(0, 1)))(state, *args)


def test_the_gradient_of_the_state_is_the_next_state():
    x, y, ct = random(8, 16), random(16, 4, seed=1), random(8, 4, seed=2)
    delayed = policy(("e4m3", "e5m2"), delayed=True, history=3)
    f = precision(lambda y, x, ct: jnp.sum((x @ y) * ct), delayed)
    state = f.init(y, x, ct)
    assert [s.shape for s in state] == [(3, 3)]
    sizes = []
    for factor in (1.0, 8.0, 0.5, 0.25):
        args = y, x * factor, ct / factor
        state, _ = step(f, state, *args)
        sizes.insert(0, [float(jnp.abs(v).max()) for v in (args[1], y, args[2])])
        wanted = np.zeros((3, 3))
        wanted[:, : len(sizes)] = np.transpose(sizes[:3])
        np.testing.assert_allclose(state[0], wanted, rtol=2**-8)


def test_scales_are_those_of_steps_before():
    """A tensor that grows by 4 saturates at its old largest size, for one step."""
    f = precision(lambda x, y: x @ y, policy(("e4m3", "e5m2"), delayed=True))
    x, y = jnp.array([[1.0, 0.5]]), jnp.eye(2)
    state = f.init(x, y)
    fresh = f(state, x, y)
    np.testing.assert_allclose(fresh, x, rtol=0.07)  # without a past, by its own size
    _, pull = jax.vjp(lambda s: f(s, x, y), state)
    (state,) = pull(jnp.ones((1, 2)))
    np.testing.assert_allclose(f(state, 4 * x, y), [[1.0, 1.0]], rtol=0.01)
    _, pull = jax.vjp(lambda s: f(s, 4 * x, y), state)
    (state,) = pull(jnp.ones((1, 2)))
    np.testing.assert_allclose(f(state, 4 * x, y), 4 * x, rtol=0.07)


def test_each_layer_of_a_scan_has_its_own_through_remat_and_branches():
    def layer(x, w):
        x = lax.cond(x[0, 0] < 1e9, lambda x: jnp.tanh(x @ w) * 3, lambda x: x @ w * 2, x)
        return x, None

    f = lambda ws, x: jnp.sum(lax.scan(jax.checkpoint(layer), x @ ws[0], ws)[0])
    ws = 0.3 * random(3, 8, 8) * jnp.array([1.0, 2.0, 4.0])[:, None, None]
    x = random(4, 8, seed=1)
    g = precision(f, "fp8_delayed")
    state = g.init(ws, x)
    assert [s.shape for s in state] == [(3, 16), (3, 3, 16), (3, 3, 16)]
    state, grads = step(g, state, ws, x)
    np.testing.assert_allclose(state[2][:, 1, 0], jnp.abs(ws).max((1, 2)), rtol=0.01)
    np.testing.assert_array_equal(state[1], 0)  # the branch that never runs
    want = jax.grad(f)(ws, x)
    cosine = jnp.vdot(grads, want) / jnp.linalg.norm(grads) / jnp.linalg.norm(want)
    assert cosine > 0.95


@pytest.mark.parametrize("layout", [(8, 1), (2, 4)], ids=str)
def test_devices_share_the_largest_size(layout):
    """The state is that of one device, to the bit, and so are the scales."""
    x, w = random(16, 8), random(8, 8, seed=1)
    body = lambda w, x: lax.psum(jnp.sum(jnp.tanh(x @ w)), ("dp", "tp"))
    mesh = make_mesh(dp=layout[0], tp=layout[1])
    spec = P(("dp", "tp"))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=(P(), spec), out_specs=P())
    name = "fp8_delayed"
    f, one = precision(sharded, name), precision(lambda w, x: jnp.sum(jnp.tanh(x @ w)), name)
    state, grads, own = one.init(w, x), jnp.ones(()), jnp.ones(())
    placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
    everywhere = lambda tree: jax.device_put(tree, jax.NamedSharding(mesh, P()))
    mine = everywhere(f.init(w, placed))
    for _ in range(2):
        state, grads = step(one, state, w, x)
        mine, own = step(f, mine, everywhere(w), placed)
        np.testing.assert_array_equal(mine[0], state[0])
    np.testing.assert_allclose(own, grads, atol=0.02 * float(jnp.abs(grads).max()))


def test_a_state_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="`delayed` is of scales of whole tensors"):
        Products("mxfp8", None, delayed=True)
    with pytest.raises(ValueError, match=r"`forward` is 'fp8'; there is 'e4m3'.*`history` is 0"):
        Products("fp8", history=0)


@pytest.mark.parametrize("shape", [(0, 32, 8), (4, 0, 8), (4, 32, 0)])
def test_products_of_nothing(shape):
    f = precision(lambda x, y: jnp.sum(x @ y), "fp8")
    m, k, n = shape
    loss, grads = jax.eval_shape(jax.value_and_grad(f, (0, 1)), random(m, k), random(k, n))
    assert [g.shape for g in grads] == [(m, k), (k, n)]
    assert loss.shape == ()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so(name):
    f = precision(lambda x, y: x @ y, policy((name, None)))
    x = random(4, 32).at[2, 5].set(jnp.nan)
    out = f(x, random(32, 8))
    assert jnp.isnan(out[2]).all()
