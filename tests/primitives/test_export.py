"""Programs with attention are serialised and read back, and give the same bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.oracle import UNOPTIMISED
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, sliding_window

pytest.importorskip("flatbuffers", reason="`jax.export` writes with it")

unoptimised = partial(jax.jit, compiler_options=UNOPTIMISED)


def loss(x, window):
    score = lambda s, b, h, q, k: s + jnp.exp(x["table"])[h, jnp.minimum(q - k, 7)]
    mask = causal() & sliding_window(window)
    out, aux = flex_attention(
        x["q"], x["k"], x["v"], score_mod=score, mask_mod=mask, sinks=x["sinks"], aux=("lse",)
    )
    return jnp.sin(out).sum() + jnp.cos(aux.lse[...]).sum()


def inputs():
    rng = np.random.default_rng(0)
    shapes = {"q": (4, 24, 4, 8), "k": (4, 24, 2, 8), "v": (4, 24, 2, 6), "sinks": (4,)}
    x = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    return x | {"table": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}, jnp.int32(5)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
def test_a_gradient_comes_back_with_the_same_bits(platforms):
    f = unoptimised(jax.value_and_grad(loss))
    x, window = inputs()
    program = export.deserialize(export.export(f, platforms=platforms)(x, window).serialize())
    assert program.platforms == platforms
    again = unoptimised(program.call)
    for a, b in zip(*map(jax.tree.leaves, (again(x, window), f(x, window))), strict=True):
        assert np.array_equal(a, b)


def test_arrays_split_by_their_type_can_be_exported():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Explicit,) * 2)
    x, window = inputs()
    spec = {n: P("dp", None, "tp") for n in "qkv"} | {"sinks": P("tp")}
    at = lambda name: NamedSharding(mesh, spec.get(name, P()))
    placed = {n: jax.device_put(a, at(n)) for n, a in x.items()}
    window = jax.device_put(window, NamedSharding(mesh, P()))
    f = unoptimised(loss)
    program = export.deserialize(export.export(f)(placed, window).serialize())
    assert program.nr_devices == 8
    assert np.array_equal(unoptimised(program.call)(placed, window), f(placed, window))
