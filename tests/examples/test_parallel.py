"""Every layout trains the same model: gradients, curves, memory; several processes; no rules."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import llama
import parallel
import train
import train_pjit
from parallel import Layout
from tests.examples.test_llama import SMALL, random_params, random_rows
from tests.examples.test_train import TINY, mesh_of, one_device, some_documents
from tests.sharding.equal import assert_equal, on_one, run_on
from xform.jaxpr import trace, walk
from xform.sharding import audit, make_mesh, shardings
from xform.sharding.context import zigzag
from xform.train.data import Rows, pack

ROOT = Path(__file__).parents[2]
slow = partial(pytest.param, marks=pytest.mark.slow)
ALL = Layout(fsdp=True, sequence=True, overlap="ring")


@pytest.fixture(scope="module")
def whole():
    def mean(params, rows):
        total, labels = llama.loss(params, rows, SMALL)
        return total / labels

    return on_one(jax.value_and_grad(mean), random_params(), random_rows())


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ((2, 4), dataclasses.replace(ALL, microbatches=2)),
        slow((4, 2), Layout(fsdp=True, keep=True)),
        slow((2, 2, 2), dataclasses.replace(ALL, context="ring", microbatches=2)),
        slow((1, 4, 2), Layout(context="all_gather", sequence=True)),
        slow((4, 2, 1), Layout(context="ulysses")),
        slow((4, 2), Layout(sequence=True)),
        slow((8, 1), Layout(fsdp=True, ahead=2)),
        slow((1, 4), Layout(sequence=True, overlap="ring", microbatches=4)),
    ],
    ids=str,
)
def test_loss_and_every_gradient_equal_those_of_one_device(whole, axes, layout):
    """In float64, which leaves nothing to tolerances."""
    mesh = mesh_on(axes)
    specs = parallel.specs_for(layout, SMALL, mesh)
    body = partial(parallel.loss_and_grads, model=SMALL, layout=layout, specs=specs)
    rows = random_rows()
    if "cp" in mesh.shape:
        rows = zigzag(rows.tokens.shape[1], mesh.shape["cp"]).split(rows)
    of_rows = parallel.specs_of_rows(mesh)
    args = (random_params(), rows)
    assert_equal(run_on(mesh, body, (specs, of_rows), (P(), specs), args), whole, rtol=1e-11)


def mesh_on(axes):
    """A mesh of dp and tp, or of dp, cp and tp."""
    if len(axes) == 2:
        return mesh_of(*axes)
    dp, cp, tp = axes
    return make_mesh(dp=dp, cp=cp, tp=tp, devices=jax.devices("cpu")[: dp * cp * tp])


def losses_on(axes, layout, steps, training=train.training, mesh=lambda mesh: mesh):
    """Those of the first steps."""
    config, rows = dataclasses.replace(TINY, layout=layout), pack(some_documents(), TINY.length)
    return np.array(
        [loss for _, loss in islice(training(config, mesh(mesh_on(axes)), rows), steps)]
    )


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_policy_reaches_the_attention_of_every_layout(fsdp):
    """Whose kernel takes no float32; a derivative that is written out would stop a policy."""
    mesh, layout = make_mesh(dp=2, tp=1, devices=jax.devices()[:2]), Layout(fsdp=fsdp)
    params = jax.eval_shape(partial(llama.init, SMALL), jax.random.key(0))
    struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.tree.map(struct, params, parallel.placement(layout, SMALL, mesh))
    rows = parallel.place_rows(random_rows(), mesh)
    program = trace(parallel.gradients(SMALL, mesh, layout, "bf16"), params, rows)
    each = [s.eqn for s in walk(program) if s.eqn.primitive.name == "flex_attention"]
    types = {x.aval.str_short(short_dtypes=True) for eqn in each for x in eqn.invars[:3]}
    assert {name[:4] for name in types} == {"bf16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ((2, 2, 2), dataclasses.replace(ALL, context="ring")),
        ((4, 2), ALL),
        ((1, 4, 2), Layout()),
        ((2, 4), Layout(sequence=True, overlap="ring", microbatches=2)),
        ((8, 1), Layout(fsdp=True)),
    ],
    ids=str,
)
def test_twenty_steps_have_the_losses_of_one_device(axes, layout):
    np.testing.assert_allclose(losses_on(axes, layout, 20), one_device()[:20], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_partitioner_alone_has_them_too():
    found = losses_on((4, 2), Layout(), 8, train_pjit.training, train_pjit.automatic)
    np.testing.assert_allclose(found, one_device()[:8], rtol=0, atol=1e-5)


def test_there_is_no_shard_map_in_it():
    assert "shard_map" not in Path(train_pjit.__file__).read_text()


def test_fsdp_leaves_each_device_an_equal_share_of_everything():
    config, mesh = dataclasses.replace(TINY, layout=ALL), mesh_of(4, 2)
    state = train.first_state(config, mesh)
    part = lambda x: x.addressable_shards[0].data.nbytes
    split = [x for x in jax.tree.leaves(state) if x.ndim]
    over_tp = {"query", "key", "value", "out", "gate", "up", "down", "embed", "unembed"}
    for path, x in jax.tree.leaves_with_path(state["params"]):
        assert part(x) * (8 if path[-1].key in over_tp else 4) == x.nbytes, path
    norms = sum(x.nbytes for x in split if x.size in (TINY.model.width, 2 * TINY.model.width))
    whole = sum(x.nbytes for x in split)
    assert sum(map(part, split)) == (whole - norms) // 8 + norms // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ((4, 2), Layout()),
        ((4, 2), ALL),
        ((4, 2), Layout(fsdp=True, late=True, sequence=True, microbatches=2)),
        ((2, 2, 2), dataclasses.replace(ALL, context="ring")),
        ((2, 2, 2), Layout(context="ulysses")),
    ],
    ids=str,
)
def test_no_communication_is_undeclared(axes, layout):
    """In the compiled step, whoever put it there: rules, derivatives or XLA."""
    mesh = mesh_on(axes)
    params = jax.eval_shape(partial(llama.init, TINY.model), jax.random.key(0))
    placed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.tree.map(placed, params, parallel.placement(layout, TINY.model, mesh))
    rows = Rows(*[np.zeros((8, 48), np.int32)] * 3)
    rows = jax.tree.map(lambda x: placed(x, shardings(mesh, parallel.specs_of_rows(mesh))), rows)
    found = audit(parallel.gradients(TINY.model, mesh, layout), (params, rows), target=None)
    assert {axis for message in found.messages for axis in message.axes} == set(mesh.axis_names)


def test_a_layout_that_does_not_divide_is_refused():
    model = dataclasses.replace(TINY.model, codes=258)
    for config, message in (
        ({"dp": 1, "cp": 2, "length": 50}, r"length / 2=25 is not a multiple of cp=2"),
        ({"length": 6, "layout": ALL}, r"length=6 is not a multiple of tp"),
        ({"layout": Layout(microbatches=3)}, r"microbatches=3 must divide the 4 rows of a device"),
        ({"model": model}, r"codes=258 is not a multiple of tp=4"),
        (
            {"model": dataclasses.replace(TINY.model, width=7), "layout": ALL},
            r"found no dimension that it divides .*\['attention_norm'\] \(2, 7\) as",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train.mesh_for(dataclasses.replace(TINY, **{"dp": 2, "tp": 4} | config))
    with pytest.raises(ValueError, match=r"layout.ahead=9 from 0 to model.layers=4"):
        train.check(train.Config(layout=Layout(ahead=9)))
    layout = Layout(overlap="ring", keep=True)
    with pytest.raises(ValueError, match=r"^config: ") as error:
        train.check(train.Config(layout=layout, processes=2, process=2, explain="a.html"))
    for words in (
        "layout.overlap hides what layout.sequence sends: set that too",
        "layout.keep and layout.late say how layout.fsdp gathers: set that too",
        "name a coordinator, and a run",
        "process=2 is none of processes=2, from 0",
        "explain is of one process",
    ):
        assert words in str(error.value)
    assert train.mesh_for(train.Config(model=llama.Config(codes=50257))).shape["tp"] == 1


# Runs train.py as one of several processes on the CPU, where other platforms may be installed.
START = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "examples")!r}]
import jax
jax.config.update("jax_platforms", "cpu")
import train
train.run_from_command_line()
"""


def start_processes(
    folder: Path, count: int, *flags: str, each: Sequence[str] = ()
) -> list[subprocess.Popen]:
    """Starts train.py in so many processes; `each` is a flag for each of them."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    many = ("--processes", str(count), "--coordinator", f"localhost:{port}")
    command = [sys.executable, "-c", START, "--run", str(folder), *flags, *many]
    return [
        subprocess.Popen(
            [*command, *each[i : i + 1], "--process", str(i)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(count)
    ]  # fmt: skip


def said(running: list[subprocess.Popen]) -> list[str]:
    """Returns what each printed, once all have ended."""
    try:
        return [process.communicate(timeout=400)[0] for process in running]
    finally:
        for process in running:
            process.kill()


def run_processes(folder: Path, count: int, *flags: str) -> list[str]:
    """Runs train.py in so many processes, and returns what each printed."""
    running = start_processes(folder, count, *flags)
    words = said(running)
    assert [p.returncode for p in running] == [0] * count, words[0][-2000:] + words[-1][-2000:]
    return words


def losses_in(folder: Path) -> list[float]:
    return [json.loads(x)["loss"] for x in (folder / "metrics.jsonl").read_text().splitlines()]


MODEL = "layers=2 width=32 heads=4 kv-heads=2 head-size=8 hidden=32"
SMALL_RUN = [
    *(f"--model.{x}" for x in MODEL.split()),
    *(f"--data={ROOT}/README.md", "--batch=8", "--length=32", "--temperature=0"),
]
SPLIT = ["--dp=4", "--tp=2", "--layout.fsdp", "--layout.sequence", "--layout.overlap=ring"]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    pytest.importorskip("tyro")
    running = start_processes(tmp_path / "two", 2, *SMALL_RUN, *SPLIT, "--steps=2000")
    path, end = tmp_path / "two" / "metrics.jsonl", time.monotonic() + 300
    while not (path.exists() and len(path.read_text().splitlines()) > 3):
        assert all(p.poll() is None for p in running), said(running)
        assert time.monotonic() < end
        time.sleep(0.1)
    running[1].send_signal(signal.SIGTERM)
    words = said(running)
    assert [p.returncode for p in running] == [128 + signal.SIGTERM] * 2, words
    done = len(losses_in(tmp_path / "two"))
    assert losses_in(tmp_path / "two") == losses_in(tmp_path / "two" / "process-1")
    assert f"stopped after step {done}, which is saved" in words[0]
    assert (tmp_path / "two" / "checkpoints" / str(done)).is_dir()


@pytest.mark.slow
def test_processes_that_differ_all_say_so_and_end(tmp_path):
    pytest.importorskip("tyro")
    rates = "--learning-rate=1e-3", "--learning-rate=2e-3"
    running = start_processes(tmp_path / "two", 2, *SMALL_RUN, *SPLIT, each=rates)
    for rank, words in enumerate(said(running)):
        assert f"rank {rank}: " in words
        assert "learning_rate is 0.001 on rank 0 and 0.002 on rank 1" in words
    assert [p.returncode for p in running] == [1, 1]


@pytest.mark.slow
def test_two_processes_have_one_mesh_and_the_losses_of_one(tmp_path):
    """Each with four devices; every process notes the same losses, and a run goes on in another."""
    pytest.importorskip("tyro")
    flags = [*SMALL_RUN, "--steps=6", "--save-every=3"]
    first, second = run_processes(tmp_path / "two", 2, *flags, *SPLIT)
    assert "validation loss" in first
    assert "cpu devices: dp=4 × tp=2" in first
    assert "validation loss" not in second
    two = losses_in(tmp_path / "two")
    assert two == losses_in(tmp_path / "two" / "process-1")
    assert np.isfinite(two).all()
    assert len(set(two)) == 6
    run_processes(tmp_path / "one", 1, *flags, "--dp=8", "--tp=1")
    np.testing.assert_allclose(losses_in(tmp_path / "one"), two, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 1), (1, 4)], ids=str)
def test_a_run_goes_on_in_another_number_of_processes(tmp_path, counts):
    """As an unbroken one: its state of data is a number, that of the next sample."""
    pytest.importorskip("tyro")
    folder = tmp_path / "run"
    flags = [*SMALL_RUN, "--steps=6", "--save-every=3"]
    run_processes(folder, counts[0], *flags, "--dp=4", "--tp=2")
    whole = losses_in(folder)
    (folder / "checkpoints" / "6").rename(tmp_path / "6")
    run_processes(folder, counts[1], "--resume", "--dp=4", "--tp=2")
    assert losses_in(folder)[:3] == whole[:3]
    np.testing.assert_allclose(losses_in(folder), whole, rtol=0, atol=1e-5)
    assert len(whole) == 6
