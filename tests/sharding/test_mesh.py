import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xform.sharding import check_divisible, cpu_devices, make_mesh, settle, shardings

cpus = jax.devices("cpu")


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_cpu_devices_makes_devices_and_a_pool_that_holds_them():
    code = """
import os, jax
from xform.sharding import cpu_devices
cpu_devices(3)
cpu_devices(5)
assert jax.device_count("cpu") == 5
cpu_devices(5)
def name(thread):
    try:
        return open(f"/proc/self/task/{thread}/comm").read()
    except FileNotFoundError:  # it has ended since it was listed
        return ""
print(sum("XLAEigen" in name(thread) for thread in os.listdir("/proc/self/task")))
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the names of threads from /proc")
    done = run(code)
    assert done.stdout == "32\n", done.stderr


@pytest.mark.parametrize(
    "before", ["", "jax.config.update('jax_num_cpu_devices', 8)"], ids=["devices", "threads"]
)
def test_cpu_devices_after_the_backend_has_started_raises(before):
    code = f"""
import os, jax
os.environ.pop("NPROC", None)
{before}
jax.devices()
from xform.sharding import cpu_devices
try:
    cpu_devices(8)
except RuntimeError as error:
    print(error)
"""
    done = run(code)
    assert "came too late" in done.stdout, done.stderr
    assert "NPROC: unset; needed are 8 and 32" in done.stdout


def test_cpu_devices_refuses_another_number_and_keeps_what_runs():
    with pytest.raises(RuntimeError, match=r"CPU devices: 8, NPROC: 32; needed are 4 and 32"):
        cpu_devices(4)
    cpu_devices(8)
    with pytest.raises(ValueError, match=r"n >= 1, found n=0"):
        cpu_devices(0)


def test_import_starts_no_backend():
    done = run("import jax, xform.sharding; jax.config.update('jax_num_cpu_devices', 3)")
    assert done.returncode == 0, done.stderr


def test_settle_waits_and_returns_the_same_tree():
    tree = {"x": jax.jit(lambda x: jnp.linalg.matrix_power(x, 50))(jnp.eye(300)), "y": 3, "z": None}
    assert settle(tree) is tree
    assert tree["x"].is_ready()


def test_make_mesh_orders_the_axes_and_keeps_tensor_neighbours():
    mesh = make_mesh(tp=2, dp=4, devices=cpus)
    assert mesh.axis_names == ("dp", "tp")
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    assert [[d.id for d in row] for row in mesh.devices] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert make_mesh(tp=1, cp=2, pp=2, dp=2, devices=cpus).axis_names == ("dp", "pp", "cp", "tp")
    assert make_mesh(ep=2, tp=2, dp=2, devices=cpus).axis_names == ("dp", "tp", "ep")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 3, "tp": 2}, r"dp=3 × tp=2, which takes 6 devices, but there are 8 \(cpu\)"),
        ({"dp": 4, "tp": 4}, r"dp=4 × tp=4, which takes 16 .*cpu_devices\(16\)"),
        ({"dp": 0, "tp": 2}, r"at least 1; found dp=0 × tp=2"),
        ({}, r"at least one axis.*found no axis"),
    ],
)
def test_make_mesh_names_every_factor(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=cpus)


def test_shardings_place_a_tree_as_its_specs_say():
    mesh = make_mesh(dp=4, tp=2, devices=cpus)
    specs = {"a": P("dp", "tp"), "b": [P(), P("tp")]}
    placed = shardings(mesh, specs)
    assert placed["a"] == NamedSharding(mesh, P("dp", "tp"))
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    y = jax.device_put({"a": x, "b": [x, x]}, placed)
    assert y["a"].addressable_shards[3].data.shape == (2, 3)
    np.testing.assert_array_equal(y["a"].addressable_shards[3].data, x[2:4, 3:])
    assert jax.typeof(y["b"][1]).sharding.spec == P("tp", None)


def test_an_array_in_another_layout_is_an_error_not_a_transfer():
    mesh = make_mesh(dp=4, tp=2, devices=cpus)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(total(jax.device_put(x, shardings(mesh, P("dp")))), [12, 16])
    with pytest.raises(ValueError, match=r"does not match the specs of the input"):
        total(jax.device_put(x, shardings(mesh, P())))


def test_check_divisible_lists_all_offenders_and_what_would_do():
    mesh = make_mesh(dp=2, tp=4, devices=cpus)
    check_divisible(mesh, dp={"batch": 6}, tp={"heads": 8, "kv_heads": 4})
    with pytest.raises(ValueError, match=r"dp=2 × tp=4") as error:
        check_divisible(mesh, dp={"batch": 5}, tp={"heads": 6, "kv_heads": 4, "hidden": 12})
    message = str(error.value)
    assert "batch=5 is not a multiple of dp=2, heads=6 is not a multiple of tp=4." in message
    assert "dp may be 1 or 5; tp may be 1 or 2." in message
    assert "kv_heads" not in message


def test_a_mesh_of_nothing_and_an_axis_that_is_not_there_are_named():
    with pytest.raises(ValueError, match=r"found devices=\[\]: leave it out to take all"):
        make_mesh(dp=1, devices=[])
    mesh = make_mesh(dp=2, tp=4, devices=cpus)
    with pytest.raises(ValueError, match=r"asked about ep, cp, and the mesh has dp=2 × tp=4: name"):
        check_divisible(mesh, ep={"experts": 8}, dp={"batch": 4}, cp={"length": 6})
