"""A checkpoint is whole or not there, whatever happens to the disk or to the arrays."""

import json
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("optax")

import optax

from xform.sharding import TensorParallel, make_mesh, settle, shardings
from xform.sharding.loss import cross_entropy
from xform.train.checkpoint import Checkpoints

RNG = np.random.default_rng(0)
SMALL, LARGE = (jnp.asarray(RNG.normal(size=n), jnp.float32) for n in (20_000, 1_000_000))


def mesh_of(dp: int, tp: int):
    return make_mesh(dp=dp, tp=tp, devices=jax.devices("cpu")[: dp * tp])


def test_a_state_comes_back_bitwise_on_another_mesh_and_in_part(tmp_path):
    x = RNG.normal(size=(8, 6)).astype(np.float32)
    place = lambda mesh, spec: jax.device_put(x, shardings(mesh, spec))
    state = {"params": {"x": place(mesh_of(4, 2), P("dp", "tp"))}, "key": jax.random.key(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, {"lr": 0.1})
    like = {"params": {"x": place(mesh_of(1, 2), P(None, "tp"))}}
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.latest, checkpoints.info()) == (7, {"lr": 0.1})
        found = checkpoints.restore(like)
        key = checkpoints.restore({"key": jax.random.key(0)})["key"]
    np.testing.assert_array_equal(found["params"]["x"], x)
    assert found["params"]["x"].sharding == like["params"]["x"].sharding
    assert key.dtype == state["key"].dtype
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(state["key"]))


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    x = jnp.asarray(LARGE)
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x + 0}, {})
        y = x + 0
        checkpoints.save(2, {"x": y}, {})
        for _ in range(3):
            y = step(y)
        y.block_until_ready()
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore({"x": x})["x"], LARGE)


def test_the_newest_are_kept_and_half_a_checkpoint_is_cleared_away(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": SMALL + step}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}
    # As a process leaves it that is killed while it writes.
    shutil.copytree(tmp_path / "3", tmp_path / "4.orbax-checkpoint-tmp")
    shutil.rmtree(tmp_path / "4.orbax-checkpoint-tmp" / "x")
    for read_only in (True, False):  # the first leaves it alone: someone may be writing it
        with Checkpoints(tmp_path, read_only=read_only) as checkpoints:
            assert (tmp_path / "4.orbax-checkpoint-tmp").is_dir() or not read_only
            assert checkpoints.latest == 3
            np.testing.assert_array_equal(checkpoints.restore({"x": SMALL})["x"], SMALL + 3)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}


def test_those_of_chosen_steps_are_kept_for_ever(tmp_path):
    for start in (1, 5):  # a run that goes on keeps them, too
        with Checkpoints(tmp_path, keep=1, keep_every=3) as checkpoints:
            for step in range(start, start + 4):
                checkpoints.save(step, {"x": SMALL + step}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"3", "6", "8"}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_state_comes_back_on_other_devices_with_the_axes_asked_for(tmp_path, kind):
    x = RNG.normal(size=(16, 8)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(x, NamedSharding(mesh, P("a")))}, {})
        checkpoints.wait()
        for shape, spec in (((2, 4), P("b", "a")), ((4, 1), P(("a", "b"))), ((1, 1), P())):
            devices = jax.devices("cpu")[: shape[0] * shape[1]]
            mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(kind, kind), devices=devices)
            at = NamedSharding(mesh, spec)
            like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
            found = checkpoints.restore({"x": like})["x"]
            np.testing.assert_array_equal(found, x)
            assert found.sharding == at
            assert jax.typeof(found).sharding.mesh.axis_types == (kind, kind)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_what_is_offloaded_comes_back_where_it_was_or_where_it_is_asked_for(tmp_path, kind):
    mesh, x = mesh_of(4, 2), RNG.normal(size=(8, 6)).astype(np.float32)
    at = NamedSharding(mesh, P("dp", "tp"), memory_kind=kind)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"moments": jax.device_put(x, at)}, {})
        checkpoints.wait()
        for asked in (at, NamedSharding(mesh_of(1, 2), P("tp"), memory_kind="device")):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=asked)
            found = checkpoints.restore({"moments": like})["moments"]
            assert found.sharding == asked
            np.testing.assert_array_equal(found, x)


ENTRIES = 1003
"""Of a vocabulary that neither two nor four devices divide."""


def model_of(tp: int):
    """A step of a model whose vocabulary is padded, its first state, and tokens of ten steps."""
    mesh, padded = make_mesh(tp=tp, devices=jax.devices("cpu")[:tp]), ENTRIES + 1
    rule, optimizer = TensorParallel("tp"), optax.adam(1e-2)
    specs = {"embed": P("tp"), "unembed": P(None, "tp")}

    def loss(params, tokens):
        x = rule.embed(params["embed"], tokens[:, :-1])
        each, _ = cross_entropy(x, params["unembed"], tokens[:, 1:], rule, entries=ENTRIES)
        return each.mean()

    of = jax.shard_map(
        jax.value_and_grad(loss), mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)
    )

    @jax.jit
    def step(state, tokens):
        loss, grads = of(state["params"], tokens)
        change, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], change), "moments": moments}, loss

    rng = np.random.default_rng(5)
    shapes = {"embed": (padded, 8), "unembed": (8, padded)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params = jax.device_put(params, shardings(mesh, specs))
    tokens = jax.device_put(rng.integers(ENTRIES, size=(10, 4, 17)), shardings(mesh, P()))
    return step, {"params": params, "moments": optimizer.init(params)}, tokens


@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_that_no_mesh_divides_goes_on_bit_by_bit(tmp_path, tp):
    """Ten steps, and five with five more after a checkpoint."""
    step, first, tokens = model_of(tp)
    state, losses = first, []
    with Checkpoints(tmp_path) as checkpoints:
        for i in range(10):
            if i == 5:
                checkpoints.save(i, state, {})
            state, loss = settle(step(state, tokens[i]))
            losses.append(float(loss))
        again = checkpoints.restore(first)  # with its counter, which is on no mesh
    for i in range(5, 10):
        again, loss = settle(step(again, tokens[i]))
        assert float(loss) == losses[i]
    assert len(set(losses)) == 10
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_what_is_restored_can_be_donated(tmp_path):
    at = shardings(mesh_of(4, 2), P("dp"))
    x = jax.device_put(np.asarray(SMALL), at)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x}, {})
        restored = checkpoints.restore({"x": x})["x"]
    assert restored.sharding == x.sharding
    fresh, again = step(x), step(restored)  # without a warning that donation failed
    assert x.is_deleted()
    assert restored.is_deleted()
    np.testing.assert_array_equal(fresh, again)


MEMORY = """
import json, resource, sys, tempfile
sys.path.insert(0, {root!r})
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from xform.train.checkpoint import Checkpoints
state = {{str(i): jax.numpy.asarray(np.random.default_rng(i).random(1 << 23, np.float32))
         for i in range(16)}}
size = sum(x.nbytes for x in state.values())
with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
    checkpoints.save(1, {{"x": state["0"]}}, {{}})  # what is loaded once
    checkpoints.wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoints.save(2, {{"x": state}}, {{}})
    checkpoints.wait()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([size, 1024 * (peak - before)]))
"""


@pytest.mark.slow
def test_saving_takes_less_than_one_and_a_half_times_the_state(tmp_path):
    """Of the host's memory, beside the state itself, half a gigabyte here."""
    code = MEMORY.format(root=str(Path(__file__).parents[2]))
    size, more = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert size == 2**29
    assert 0.5 * size < more < 1.5 * size


def test_every_leaf_that_differs_is_named(tmp_path):
    state = {
        "params": {"w": SMALL, "b": SMALL[:2], "old": SMALL},
        "optimizer": (SMALL, {"n": 1 + SMALL}),
    }
    like = {
        "params": {"w": SMALL[:3], "b": SMALL[:2].astype("bfloat16"), "new": SMALL},
        "optimizer": (SMALL, {"n": 1 + SMALL}),
        "key": jax.random.key(0),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, {})
        checkpoints.wait()
        with pytest.raises(ValueError, match=r"/5` is of another program: ") as error:
            checkpoints.restore(like)
    for words in (
        "`params/w` is float32[20000] there and float32[3] here",
        "`params/b` is float32[2] there and bfloat16[2] here",
        "`params/old` is float32[20000] there and missing here",
        "`params/new` is missing there and float32[20000] here",
        "it holds no `key`",
    ):
        assert words in str(error.value)
    assert "optimizer" not in str(error.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:10])


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            tree = {"a": SMALL + step, "b": SMALL + step}
            checkpoints.save(step, {"x": tree}, {"at": step})
    return folder


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("x/ocdbt.process_0/d/*", cut),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("info/metadata", lambda path: path.unlink()),
                ("info", shutil.rmtree),
                ("x/_METADATA", lambda path: path.unlink()),
                ("x/_METADATA", cut),
                ("x/manifest.ocdbt", cut),
                ("x/d/*", lambda path: path.unlink()),
            )
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_damaged_checkpoint_is_named_and_the_whole_one_before_it(
    two_saved, tmp_path, pattern, damage
):
    def read(checkpoints):
        return checkpoints.info()["at"], checkpoints.restore({"x": {"a": SMALL, "b": SMALL}})

    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "2").glob(pattern):
        damage(path)
    message = r"of step 2 is damaged, `.*/2` can't be read \(.*\)\. "
    found = pytest.raises(ValueError, match=message + r"That of step 1 can be .*`.*/2` too")
    with Checkpoints(tmp_path, read_only=True) as checkpoints, found:
        read(checkpoints)
    shutil.move(tmp_path / "2", tmp_path.parent / f"{tmp_path.name}-2")
    with Checkpoints(tmp_path) as checkpoints:
        at, found = read(checkpoints)
    assert at == 1
    np.testing.assert_array_equal(found["x"]["b"], SMALL + 1)
    shutil.rmtree(tmp_path / "1" / "info")
    found = pytest.raises(ValueError, match=r"of step 1 is damaged.*There is none before it")
    with Checkpoints(tmp_path) as checkpoints, found:
        read(checkpoints)


def test_where_there_is_none_it_says_so(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in `.*new`"):
            checkpoints.restore({"x": SMALL})
    with pytest.raises(FileNotFoundError, match=r"no checkpoints: `.*nothing` is no folder"):
        Checkpoints(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()


@contextmanager
def small_files(path):
    """No file may grow beyond 300 kB: writes fail as they do on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        yield "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(path):
    """The folder is a disk of 2 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield "No space left on device"
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def checked_until_it_fails(checkpoints: Checkpoints) -> None:
    """As a loop does after each of its steps."""
    for _ in range(3000):
        checkpoints.check()
        time.sleep(0.01)


@pytest.mark.parametrize("full", [small_files, small_disk])
def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(tmp_path, full, capfd):
    """One error with one message: no traceback of orbax before it, and no log."""
    with full(tmp_path) as reason:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"x": SMALL}, {"at": 1})
            checkpoints.wait()
            checkpoints.save(2, {"x": LARGE}, {"at": 2})
            message = rf"4.0 MB could not be .*{reason}.*that of step 1 is"
            with pytest.raises(OSError, match=message) as error:
                checked_until_it_fails(checkpoints)
            shown = traceback.format_exception(error.value)
            assert "/orbax/" not in "".join(shown)
        assert {path.name for path in tmp_path.iterdir()} == {"1"}
        with pytest.raises(OSError, match=reason), Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, {"x": LARGE}, {"at": 2})
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.info() == {"at": 1}
            np.testing.assert_array_equal(checkpoints.restore({"x": SMALL})["x"], SMALL)
    assert capfd.readouterr() == ("", "")
