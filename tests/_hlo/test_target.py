"""Programs compiled for a device that this machine lacks."""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform._hlo import compile_and_dump, compile_for, lower_for, read, target_mesh

ROOT = Path(__file__).parents[2]
P = jax.P
MIB = 2**20


def test_compiles_for_a_gpu_that_is_not_there():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    compiled = compile_for("H200", lambda x: x @ x.T, x)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * MIB
    program = read(compiled)
    assert "H200" in program.device
    assert program.platform == "gpu"
    assert program.total(lambda k: k.work.matrix) == 2 * 1024**3


def test_compiles_after_jax_has_found_no_gpu():
    """Nobody says `JAX_PLATFORMS=cpu` on a machine without one."""
    program = """
import jax
jax.devices()
from xform._hlo import compile_for
print(compile_for("H200", lambda x: x + 1, jax.numpy.ones(3)).as_text().count("fusion("))
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_names_the_targets_it_knows():
    with pytest.raises(ValueError, match=r"`target` may be 'H200'; found 'H2000'"):
        compile_for("H2000", lambda x: x, jax.ShapeDtypeStruct((), jnp.float32))


@pytest.fixture(scope="module")
def step():
    """A data- and tensor-parallel step, written for the CPU devices, compiled for eight H200s."""
    mesh = jax.make_mesh((4, 2), ("dp", "tp"))
    spec = P(None, None, "tp")

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, P("dp")), out_specs=P())
    def loss(w, x):
        def layer(h, w):
            y = jax.lax.psum_scatter(jnp.tanh(h) @ w @ w.T, "tp", scatter_dimension=1, tiled=True)
            return jax.lax.all_gather(y, "tp", axis=1, tiled=True) + h, None

        h, _ = jax.lax.scan(layer, jax.lax.pcast(x, "tp", to="varying"), w)
        return jax.lax.pmean(jnp.mean(h**2), ("dp", "tp"))

    @partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - jax.grad(loss)(w, x)

    place = lambda spec: jax.NamedSharding(mesh, spec)
    w = jax.ShapeDtypeStruct((6, 256, 256), jnp.float32, sharding=place(spec))
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=place(P("dp")))
    compiled, dump = compile_and_dump(lower_for("H200", step, w, x))
    return compiled, read(compiled, dump=dump), dump


def test_a_mesh_of_present_devices_stands_for_one_of_the_targets(step):
    compiled, program, _ = step
    assert program.mesh == {"dp": 4, "tp": 2}
    assert program.module.partitions == 8
    assert len({d for s in jax.tree.leaves(compiled.input_shardings) for d in s.device_set}) == 8
    axes = {(c.op, c.axes) for c in program.collectives}
    assert {("all-gather", ("tp",)), ("reduce-scatter", ("tp",)), ("all-reduce", ("dp",))} <= axes
    assert all("test_target.py" in c.kernel.line for c in program.collectives)


def test_donation_is_kept(step):
    compiled, _, dump = step
    weights = 6 * 256 * 128 * 4
    assert compiled.memory_analysis().alias_size_in_bytes == weights
    assert sum(b.bytes == weights and b.kind == "parameter" for b in dump.buffers) >= 1


def test_trips_survive_what_the_compiler_does_to_loops(step):
    """It peels and pipelines them: an iteration may stand outside, but the products add up."""
    _, program, _ = step
    product = 2 * 128 * 256 * 128
    # Forward two for each layer, backward four; the last layer's may be spared, none is added.
    assert program.total(lambda k: k.work.matrix) == 6 * 6 * product
    moved = [c for c in program.collectives if c.axes == ("tp",)]
    assert sum(c.kernel.trips for c in moved) == 4 * 6  # two forward, their transposes backward


def test_windows_hold_what_runs_meanwhile(step):
    _, program, _ = step
    order = [k.name for k in program.kernels]
    for c in program.collectives:
        assert set(c.window) <= set(order)
        if not c.overlaps:
            assert c.window == ()
        for name in c.window:
            assert order.index(name) > order.index(c.kernel.name)
    assert any(c.overlaps for c in program.collectives)


def test_launches_are_those_that_the_runtime_makes(step):
    _, program, dump = step
    kernels = {k.name: k for k in program.kernels}
    for launch in dump.launches:
        # The condition of a loop with a known trip count is listed, and never run.
        assert launch.instruction in kernels or "compare" in launch.instruction
    assert all(k.launches >= 1 for k in program.kernels)
    assert 0 < sum(k.graph for k in program.kernels) <= sum(k.launches for k in program.kernels)
    collective = [k for k in program.kernels if k.kind == "collective"]
    assert collective
    nodes = [launch for launch in dump.launches if launch.graph]
    assert {launch.instruction for launch in nodes} == {k.name for k in kernels.values() if k.graph}


def test_buffers_fill_what_xla_says_it_needs(step):
    compiled, _, dump = step
    stats = compiled.memory_analysis()
    temp = {b.allocation: 0 for b in dump.buffers if b.kind == "temp"}
    for b in dump.buffers:
        if b.kind == "temp":
            temp[b.allocation] = max(temp[b.allocation], b.offset + b.bytes)
    assert sum(temp.values()) == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    arguments = {b.allocation: b.bytes for b in dump.buffers if b.kind == "parameter"}
    assert sum(arguments.values()) == stats.argument_size_in_bytes


def test_a_mesh_of_the_target_itself_serves_as_well():
    mesh = target_mesh("H200", {"tp": 4})
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "tp"), mesh=mesh.abstract_mesh, in_specs=P("tp"), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("tp")))
    (reduce,) = read(compile_for("H200", f, x)).collectives
    assert (reduce.op, reduce.axes, reduce.kernel.read) == ("all-reduce", ("tp",), 16 * 8 * 4)


def test_a_mesh_inside_of_the_program_is_found():
    mesh = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])
    inside = jax.shard_map(lambda x: jax.lax.pmax(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P())
    program = read(compile_for("H200", jax.jit(inside), jnp.ones((8, 8))))
    assert program.module.partitions == 4


def test_meshes_of_several_sizes_are_refused():
    sizes = [jax.make_mesh((n,), ("a",), devices=jax.devices()[:n]) for n in (2, 4)]
    x, y = (
        jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(m, P("a")))
        for m in sizes
    )
    with pytest.raises(ValueError, match=r"incompatible|one number of devices"):
        lower_for("H200", lambda x, y: (x + 1, y + 1), x, y)


def test_no_cache_is_read_or_written():
    """Programs for a target can't be read back, and JAX warns where it tries."""
    f, x = jax.jit(lambda x: x * 3 + 1), np.ones((4, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = {compile_for("H200", f, x).as_text() for _ in range(2)}
    assert len(texts) == 1
