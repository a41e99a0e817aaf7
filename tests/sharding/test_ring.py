"""Rings equal the gathers and scatters that they hide, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform.sharding import ring, shardings

SPECS = (P("dp", "tp"), [P(None, "tp"), P(None, "tp")], P("tp", None))


def arrays(t: int = 16):
    v = values(0, x=(8, t, 5), a=(5, 16), b=(5, 8), c=(8, 5))
    return v["x"], [v["a"], v["b"]], v["c"]


def block(x, opening, closing, gather, scatter):
    """A gated unit whose two columns have different widths."""
    a, b = gather(x, opening)
    return scatter(jnp.sin(a[..., ::2] + a[..., 1::2]) * b, closing)


def dense(x, opening, closing):
    return block(x, opening, closing, lambda x, ws: [x @ w for w in ws], lambda x, w: x @ w)


def ringed(x, opening, closing):
    gather = lambda x, ws: ring.gather_matmul(x, ws, "tp", dim=1)
    return block(x, opening, closing, gather, lambda x, w: ring.matmul_scatter(x, w, "tp", dim=1))


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        {"dp": 2, "tp": 4},
        pytest.param({"dp": 1, "tp": 8}, marks=pytest.mark.slow),
        pytest.param({"dp": 8, "tp": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_block_and_its_gradients_equal_the_dense_ones(axes):
    loss = lambda f: lambda *args: jnp.sum(jnp.cos(f(*args)))

    def sharded(*args):
        summed = lambda *args: jax.lax.psum(loss(ringed)(*args), ("dp", "tp"))
        return ringed(*args), jax.grad(summed, argnums=(0, 1, 2))(*args)

    plain = lambda *args: (dense(*args), jax.grad(loss(dense), argnums=(0, 1, 2))(*args))
    found = run_on(mesh_of(**axes), sharded, SPECS, (P("dp", "tp"), SPECS), arrays())
    assert_equal(found, on_one(plain, *arrays()))


def test_bfloat16_is_as_right_as_the_plain_collectives():
    """Against float64: sums that travel are rounded at every stop, as NCCL's are."""
    mesh = mesh_of(tp=8)
    v = values(1, x=(32, 64), w=(64, 64), u=(64, 16))
    specs = (P("tp"), P(None, "tp"), P("tp"))
    narrow = {k: jnp.asarray(x, jnp.bfloat16) for k, x in v.items()}
    exact = {k: np.asarray(x, np.float64) for k, x in narrow.items()}
    args = jax.device_put(tuple(narrow.values()), shardings(mesh, specs))

    def plain(x, w, u):
        h = jax.lax.all_gather(x, "tp", tiled=True) @ w
        return jax.lax.psum_scatter(h @ u, "tp", tiled=True)

    def hidden(x, w, u):
        (h,) = ring.gather_matmul(x, [w], "tp")
        return ring.matmul_scatter(h, u, "tp")

    truth = exact["x"] @ exact["w"] @ exact["u"]
    error = lambda f: np.sqrt(np.square(np.asarray(f, np.float64) - truth).mean())
    on = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("tp")))
    assert error(on(hidden)(*args)) <= 1.5 * error(on(plain)(*args))


@pytest.mark.parametrize("narrow", ["x", "w"])
def test_gradients_have_the_dtypes_of_what_they_are_of(narrow):
    dtypes = {name: "bfloat16" if name == narrow else "float32" for name in "xw"}
    x, w = np.ones((8, 4)), np.ones((4, 8))
    args = jnp.asarray(x, dtypes["x"]), jnp.asarray(w, dtypes["w"])

    def loss(x, w):
        (y,) = ring.gather_matmul(x, [w], "tp")
        return jax.lax.psum(jnp.sum(y), "tp")

    specs = P("tp"), P(None, "tp")
    f = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh_of(tp=4), in_specs=specs, out_specs=specs)
    dx, dw = f(*jax.device_put(args, shardings(mesh_of(tp=4), specs)))
    assert (dx.dtype, dw.dtype) == (args[0].dtype, args[1].dtype)
    np.testing.assert_array_equal(dx, 8)
    np.testing.assert_array_equal(dw, 8)


def test_what_does_not_fit_is_named_at_once(monkeypatch, unchecked):
    mesh = mesh_of(dp=2, tp=4)
    x, w = np.ones((8, 4)), np.ones((4, 8))

    def run(f, spec):
        f = jax.shard_map(f, mesh=mesh, in_specs=(spec, P(None, "tp")), out_specs=P("dp"))
        jax.eval_shape(f, *jax.device_put((x, w), shardings(mesh, (spec, P(None, "tp")))))

    with pytest.raises(
        ValueError,
        match=r"`gather_matmul`: `x` is the same on all devices of 'tp'; it varies over \['dp'\]: "
        r"split it over 'tp' first; `dim` is 1 of \(4, 4\); needed is a dimension of rows",
    ):
        run(lambda x, w: ring.gather_matmul(x, [w], "tp", dim=1), P("dp"))
    with pytest.raises(ValueError, match=r"deals out 2 rows \(dimension 0 of \(2, 4\)\) over tp=4"):
        run(lambda x, w: ring.matmul_scatter(x, w, "tp"), P("tp"))
    with pytest.raises(ValueError, match=r"there is no 't' among the axes of a `jax.shard_map`"):
        run(lambda x, w: ring.gather_matmul(x, [w], "t"), P("tp"))
    with pytest.raises(ValueError, match=r"of shapes \[\(2,\), .*a list of matrices of 4 rows"):
        run(lambda x, w: ring.gather_matmul(x, w, "tp"), P("tp"))
    with pytest.raises(ValueError, match=r"of shapes \[\(4, 2\)\]; .* of 2 rows, as `x` \(2, 2\)"):
        run(lambda x, w: ring.matmul_scatter(x[:, :2], w, "tp"), P("tp"))
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_gpu_use_memcpy_local_p2p=true")
    with pytest.raises(ValueError, match=r"XLA_FLAGS has --xla_gpu_use_memcpy_local_p2p=true"):
        run(lambda x, w: ring.gather_matmul(x, [w], "tp")[0], P("tp"))
