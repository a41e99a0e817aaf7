"""JAX's collective matmul by name: runs or says why not. Numbers are `tests/gpu`'s business."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import mesh_of
from xform.sharding import TensorParallel

TP = TensorParallel("tp", sequence=True, overlap="pallas")
SPECS = (P(None, "tp"), P(None, "tp"), P(None, "tp"))


def step(x, w, u):
    """Two columns and a row, forward and backward."""

    def loss(x, w, u):
        a, b = TP.column(x, w, u)
        assert a.shape[-1] != b.shape[-1]
        y = TP.row(a, w.T)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32)) + jnp.sum(b.astype(jnp.float32)), "tp")

    return jax.grad(loss, argnums=(0, 1, 2))(x, w, u)


def traced(dtype, M=512):
    mesh = mesh_of(tp=8)
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype, sharding=jax.NamedSharding(mesh, SPECS[0]))
    f = jax.shard_map(step, mesh=mesh, in_specs=SPECS, out_specs=SPECS)
    return jax.jit(f).trace(shape(2, 8 * 128, M), shape(M, 8 * 256), shape(M, 8 * 128))


def test_elsewhere_it_is_refused():
    with pytest.raises(
        NotImplementedError,
        match=r'overlap="pallas"`: its arrays are .*float32.*; needed is one dtype, bfloat16 or '
        r"float16; devices are cpu; needed is NVIDIA's Hopper; a device has 40 numbers a row; "
        r'needed is a multiple of 64. Use `overlap="ring"`',
    ):
        traced(jnp.float32, M=40)


class Hopper:
    """As much of a GPU as is asked while a kernel is traced."""

    compute_capability, core_count, device_kind = "9.0", 132, "NVIDIA H200"


def test_it_is_traced_and_lowered_for_gpus(monkeypatch):
    real = jax.devices
    ask = lambda *platform: real(*platform) if platform else [Hopper(), *real()[1:]]
    monkeypatch.setattr(jax, "devices", ask)
    module = traced(jnp.bfloat16).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("@mosaic_gpu_v2") == 1
    assert "collective_permute" in module, "the way back is the ring's"
