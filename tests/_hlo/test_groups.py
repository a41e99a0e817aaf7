"""Collectives: who takes part, how many bytes, how often; on a CPU and for an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform._hlo import axes_of, compile_for, read
from xform._hlo._groups import groups_of, wire_bytes
from xform._hlo._text import Instruction

P = jax.P


def collective(text: str) -> Instruction:
    return Instruction("all", "f32[8]", "all-reduce", "%x", text)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([3,2,1,0]) {'b'}", ((3, 2), (1, 0))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("source_target_pairs={{0,1},{1,2},{2,3}}", ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_every_form_of_groups(text, groups):
    assert groups_of(collective(f", channel_id=1, {text}, use_global_device_ids=true"), 4) == groups


def test_a_form_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"can't read the replica groups of all: 'tree"):
        groups_of(collective(", replica_groups=tree(0,1)"), 4)


def test_axes():
    mesh = {"dp": 2, "pp": 1, "tp": 4}
    assert axes_of(((0, 1, 2, 3), (4, 5, 6, 7)), mesh) == ("tp",)
    assert axes_of(((0, 4), (1, 5)), mesh) == ("dp",)
    assert axes_of((tuple(range(8)),), mesh) == ("dp", "tp")
    assert axes_of(((0, 1), (1, 0)), mesh) == ("tp",)
    assert axes_of(((0, 1),), {"dp": 1}) is None  # another mesh's device


def test_bytes_on_the_wire():
    assert wire_bytes("all-reduce", 4, 100, 100) == 150
    assert wire_bytes("all-gather", 4, 25, 100) == 75
    assert wire_bytes("reduce-scatter", 4, 100, 25) == 75
    assert wire_bytes("all-to-all", 4, 100, 100) == 75
    assert wire_bytes("collective-permute", 2, 100, 100) == 100


MESH = {"x": 2, "y": 2, "z": 2}


def everything(a):
    """Each collective, over an axis or two, none of which another could be merged with."""
    moved = jax.lax.ppermute(a, "x", [(0, 1), (1, 0)])
    exchanged = jax.lax.all_to_all(a, "y", split_axis=0, concat_axis=0, tiled=True)
    summed = jax.lax.psum(a, ("x", "z"))
    gathered = jax.lax.all_gather(a, "z", axis=0, tiled=True)
    scattered = jax.lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True)
    return (
        moved + exchanged * jnp.sin(summed),
        gathered.sum(0, keepdims=True),
        scattered * jax.lax.pmax(a, "y")[:, :4],
    )


EXPECTED = {  # bytes read and written by a device: a is [8, 8, 16] float32 on each
    ("collective-permute", ("x",)): (4096, 4096),
    ("all-to-all", ("y",)): (4096, 4096),
    ("all-reduce", ("x", "z")): (4096, 4096),
    ("all-gather", ("z",)): (4096, 8192),
    ("reduce-scatter", ("y",)): (4096, 2048),
    ("all-reduce", ("y",)): (4096, 4096),
}


@pytest.mark.parametrize("target", [None, "H200"])
def test_collectives_by_axis_and_bytes(target):
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH))
    specs = P("x", "y", "z")
    f = jax.shard_map(everything, mesh=mesh, in_specs=specs, out_specs=(specs, specs, specs))
    placed = jax.NamedSharding(mesh, specs)
    a = jax.ShapeDtypeStruct((16, 16, 32), jnp.float32, sharding=placed)
    compiled = compile_for(target, f, a) if target else jax.jit(f).lower(a).compile()
    program = read(compiled)
    assert program.mesh == MESH
    found = {(c.op, c.axes): (c.kernel.read, c.kernel.written) for c in program.collectives}
    assert found == EXPECTED
    assert len(program.collectives) == len(EXPECTED)
    for c in program.collectives:
        assert "test_groups.py" in c.kernel.line
        assert "everything" in c.kernel.line


def test_groups_are_positions_in_the_mesh_not_device_numbers():
    devices = np.array(jax.devices())[[5, 2, 7, 0, 1, 6, 3, 4]].reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("dp", "tp"))
    f = jax.shard_map(
        lambda a: (jax.lax.psum(a, "tp"), jax.lax.pmax(a, "dp")),
        mesh=mesh,
        in_specs=P("dp", "tp"),
        out_specs=(P("dp"), P(None, "tp")),
    )
    placed = jax.NamedSharding(mesh, P("dp", "tp"))
    a = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=placed)
    program = read(jax.jit(f).lower(a).compile())
    assert {c.axes for c in program.collectives} == {("tp",), ("dp",)}


def test_automatic_sharding_names_the_users_axes():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=auto)
    place = lambda *spec: jax.NamedSharding(mesh, P(*spec))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=place("dp", "tp"))
    w = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=place("tp"))
    f = jax.jit(lambda x, w: x @ w, out_shardings=place("dp"))
    (reduce,) = read(f.lower(x, w).compile()).collectives
    assert (reduce.op, reduce.axes) == ("all-reduce", ("tp",))
    assert reduce.kernel.read == 4 * 64 * 4
    assert reduce.sent == 4 * 64 * 4  # two halves of it, to one other device


LAYERS = 5


@partial(jax.jit, static_argnums=2)
def layers(w, x, mesh):
    """FSDP over `dp` and sequence-parallel tensors over `tp`, scanned."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "dp"), P("tp")), out_specs=P())
    def loss(w, x):
        def layer(h, w):
            w = jax.lax.all_gather(w, "dp", axis=0, tiled=True)
            return h + jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, jax.lax.pcast(x, "dp", to="varying"), w)
        return jax.lax.pmean(jnp.mean(h**2), ("dp", "tp"))

    return jax.grad(loss)(w, x)


def test_collectives_in_a_scan_count_its_trips():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"))
    w = jax.ShapeDtypeStruct(
        (LAYERS, 32, 32), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, "dp"))
    )
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=jax.NamedSharding(mesh, P("tp")))
    program = read(layers.lower(w, x, mesh).compile())
    runs: dict = {}
    sent: dict = {}
    for c in program.collectives:
        key = (c.op, c.axes)
        runs[key] = runs.get(key, 0) + c.kernel.trips
        sent[key] = sent.get(key, 0) + c.kernel.trips * c.sent
    weights = 32 * 32 * 4
    assert runs["all-gather", ("dp",)] in (LAYERS, 2 * LAYERS)  # again in the backward, or kept
    assert sent["all-gather", ("dp",)] == runs["all-gather", ("dp",)] * weights * 3 // 4
    assert runs["reduce-scatter", ("dp",)] == LAYERS
    assert sent["reduce-scatter", ("dp",)] == LAYERS * weights * 3 // 4
