"""The optimiser's step: by kernels what optax makes of it, in the state's own memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import llama
import parallel
import updates
from xform._hlo import compile_for, target_mesh
from xform.sharding import make_mesh

MODEL = llama.Config(codes=64, layers=2, width=32, hidden=64, heads=4, kv_heads=2, head_size=8)
ADAMW = updates.optimizer(3e-3, 30, 0.1)


def begun(model=MODEL):
    params = llama.init(model, jax.random.key(0))
    like = lambda i, x: jax.random.normal(jax.random.key(i), x.shape)
    leaves, tree = jax.tree.flatten(params)
    grads = tree.unflatten([like(i, x) for i, x in enumerate(leaves)])
    return {"params": params, "optimizer": ADAMW.init(params)}, grads


def test_kernels_make_the_steps_that_optax_makes():
    """Of gradients above and below what they are clipped to; none where a loss is not finite."""
    state, grads = begun()
    kernels, plain = jax.jit(ADAMW.step), updates.update_of(ADAMW.chain)
    found, wanted = (jax.tree.map(jnp.copy, state) for _ in range(2))
    for i in range(12):
        scaled = jax.tree.map(lambda g, i=i: g * 10.0 ** (-i), grads)
        wanted, loss = plain(wanted, jnp.float32(jnp.nan if i == 3 else 0.5), scaled)
        assert np.isnan(loss) == (i == 3)
        found = kernels(found, scaled, jnp.isfinite(loss))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-7)
    jax.tree.map(close, found, wanted)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), found["params"], state["params"])
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("axes", [None, dict(dp=4, tp=2)], ids=["one", "split"])
def test_on_a_gpu_a_step_takes_no_memory_and_copies_nothing(axes):
    state, grads = begun()
    if axes:
        mesh, layout = make_mesh(**axes), parallel.Layout(fsdp=True)
        there = target_mesh("H200", axes, mesh.axis_types)
        state = updates.first_state(MODEL, mesh, layout, None, ADAMW)
        on = lambda x: NamedSharding(there, x.sharding.spec)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(x)), state
        )
        grads = state["params"]
    program = compile_for("H200", updates.update_of(ADAMW), state, jnp.float32(0), grads)
    text, memory = program.as_text() or "", program.memory_analysis()
    kernels = [x for x in text.splitlines() if 'custom_call_target="mosaic_gpu' in x]
    assert len(kernels) == len(jax.tree.leaves(grads))
    assert all(x.split("output_to_operand_aliasing")[1].count(": (") == 3 for x in kernels)
    assert not re.search(r" copy(-start)?\(", text)
    assert memory.temp_size_in_bytes < 1 << 14
