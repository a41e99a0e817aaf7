"""Rules under every kind of axis, in a part of the mesh, and under `vmap`."""

import ast
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.oracle import UNOPTIMISED
from tests.sharding.equal import assert_equal, mesh_of, on_one, values, wide
from xform.sharding import TensorParallel, data, fsdp, shardings

B, T, M, F, L = 4, 8, 6, 8, 3
PLAIN = TensorParallel("tp")
RING = TensorParallel("tp", sequence=True, overlap="ring")
SPECS = {"up": P(None, None, "tp"), "down": P(None, "tp"), "scale": P()}


def layer(tp, x, p):
    (up,) = tp.column(x * p["scale"][None, None], p["up"])
    return x + tp.row(jnp.tanh(up), p["down"])


def model(x, stack, tp=TensorParallel()):  # noqa: B008
    return jax.lax.scan(lambda x, p: (layer(tp, x, p), None), x, stack)[0]


def arrays(*ensemble: int):
    shapes = {"up": (L, M, F), "down": (L, F, M), "scale": (L, M)}
    stack = values(1, **{name: (*ensemble, *shape) for name, shape in shapes.items()})
    return values(0, x=(*ensemble, B, T, M))["x"], stack


def loss_and_grads(f):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums=(0, 1))


def typed_mesh(dp: AxisType, tp: AxisType) -> Mesh:
    devices = np.array(jax.devices("cpu")).reshape(4, 2)
    return Mesh(devices, ("dp", "tp"), axis_types=(dp, tp))


KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize("manual", [{"tp"}, {"dp", "tp"}], ids=["tp", "both"])
@pytest.mark.parametrize("kinds", [*product(KINDS, KINDS)], ids="{0[0].name}-{0[1].name}".format)
def test_every_kind_of_axis_gives_the_same_numbers(kinds, manual):
    """Rows are split over `dp` in any case: by hand, by type, or by the partitioner.

    The result lies as the rows do, also where an axis was left to others.
    """
    mesh = typed_mesh(*kinds)
    rows = P("dp") if "dp" in manual else P()
    f = jax.shard_map(
        partial(model, tp=PLAIN), mesh=mesh, in_specs=(rows, SPECS), out_specs=rows,
        axis_names=manual,
    )  # fmt: skip
    x, stack = arrays()
    with jax.enable_x64(True):
        at = (NamedSharding(mesh, P("dp")), shardings(mesh, SPECS))
        args = jax.device_put(jax.tree.map(wide, (x, stack)), at)
        step = jax.jit(lambda *a: (f(*a), loss_and_grads(f)(*a)), compiler_options=UNOPTIMISED)
        y, found = step(*args)
        assert y.sharding.is_equivalent_to(at[0], y.ndim)
        found = jax.device_get((y, found))
    assert_equal(found, on_one(lambda *a: (model(*a), loss_and_grads(model)(*a)), x, stack))


def sharded(tp, zero: bool, mesh):
    """Loss and gradients on a mesh: rings, and layers that are gathered ahead."""
    specs = fsdp.split(SPECS, arrays()[1], mesh, skip=1) if zero else SPECS
    x_spec = P("dp", "tp") if tp.sequence else P("dp")
    gather = partial(data.gather, specs={n: P(*s[1:]) for n, s in specs.items()}, axis="dp")

    def step(x, stack):
        def loss(x, stack):
            stack = data.per_device(stack, ("dp", "tp") if tp.sequence else "dp")
            one = partial(layer, tp)
            y = fsdp.scan_layers(one, x, stack, gather=gather) if zero else model(x, stack, tp)
            total = jnp.sum(jnp.sin(y))
            return jax.lax.psum(total, ("dp", "tp") if tp.sequence else "dp")

        return jax.value_and_grad(loss, argnums=(0, 1))(x, stack)

    args = (x_spec, specs)
    return jax.shard_map(step, mesh=mesh, in_specs=args, out_specs=(P(), args)), args


@pytest.mark.parametrize(
    ("tp", "zero"),
    [(RING, True), pytest.param(PLAIN, False, marks=pytest.mark.slow)],
    ids=["ring-fsdp", "plain"],
)
def test_vmap_over_an_ensemble_of_sharded_models(tp, zero):
    """Three models at once, and each is what it is alone."""
    mesh = mesh_of(dp=2, tp=2)
    f, specs = sharded(tp, zero, mesh)
    args = arrays(3)
    with jax.enable_x64(True):
        ahead = jax.tree.map(lambda s: P(None, *s), specs, is_leaf=lambda s: isinstance(s, P))
        placed = jax.device_put(jax.tree.map(wide, args), shardings(mesh, ahead))
        found = jax.device_get(jax.jit(jax.vmap(f), compiler_options=UNOPTIMISED)(*placed))
    for i in range(3):
        alone = jax.tree.map(lambda x, i=i: x[i], args)
        expected = on_one(loss_and_grads(model), *alone)
        assert_equal(jax.tree.map(lambda x, i=i: x[i], found), expected)


def test_an_ensemble_may_be_split_over_an_axis_of_its_own():
    """Two models on half of the mesh each, by `spmd_axis_name`."""
    mesh = mesh_of(dp=2, tp=2, ep=2)
    f, specs = sharded(PLAIN, False, mesh)
    args = arrays(2)
    with jax.enable_x64(True):
        ahead = jax.tree.map(lambda s: P("ep", *s), specs, is_leaf=lambda s: isinstance(s, P))
        placed = jax.device_put(jax.tree.map(wide, args), shardings(mesh, ahead))
        both = jax.vmap(f, spmd_axis_name="ep")
        found = jax.jit(both, compiler_options=UNOPTIMISED)(*placed)
        assert jax.typeof(found[1][1]["up"]).sharding.spec[0] == "ep"
        found = jax.device_get(found)
    for i in range(2):
        alone = jax.tree.map(lambda x, i=i: x[i], args)
        expected = on_one(loss_and_grads(model), *alone)
        assert_equal(jax.tree.map(lambda x, i=i: x[i], found), expected)


def test_types_are_checked_in_every_rule():
    """No rule turns them off."""
    from pathlib import Path

    import xform.sharding

    (folder,) = xform.sharding.__path__
    off = [
        f"{path}:{node.value.lineno}"
        for path in Path(folder).glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep")
        if not (isinstance(node.value, ast.Constant) and node.value.value is True)
    ]
    assert off == []
