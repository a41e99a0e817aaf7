"""The model in a pipeline: gradients, curves, checkpoints, tables from files, what is refused."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import llama
import parallel
import pipelined
import train
from parallel import Layout
from tests.examples.test_llama import SMALL, random_rows
from tests.examples.test_train import TINY, StopAfter, some_documents
from tests.oracle import UNOPTIMISED, once
from xform.sharding import make_mesh, settle
from xform.sharding.pipeline import by_rank, zb_h1
from xform.train.data import pack
from xform.train.run import Stop

slow = partial(pytest.param, marks=pytest.mark.slow)
DEEP = dataclasses.replace(SMALL, layers=4)
ALL = Layout(fsdp=True, sequence=True, overlap="ring")


def mesh_of(dp: int, pp: int, tp: int, cp: int | None = None):
    devices = jax.devices("cpu")[: dp * pp * tp * (cp or 1)]
    return make_mesh(dp=dp, pp=pp, cp=cp, tp=tp, devices=devices)


def wide_params() -> dict:
    rng = np.random.default_rng(2)
    params = once(partial(llama.init, DEEP), jax.random.key(1))
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)


@pytest.fixture(scope="module")
def one_device():
    def mean(params, rows):
        total, labels = llama.loss(params, rows, DEEP)
        return total / labels

    with jax.enable_x64(True):
        return jax.device_get(once(jax.value_and_grad(mean), wide_params(), random_rows()))


@pytest.mark.parametrize(
    ("axes", "name", "microbatches", "executor", "layout"),
    [
        ((2, 2, 2), "zb-h1", 2, "one_program", Layout(fsdp=True, late=True, sequence=True)),
        slow((2, 2, 2), "zb-v", 2, "per_stage", Layout(fsdp=True, late=True)),
        slow((2, 2, 2), "zb-h1", 4, "one_program", ALL),
        slow((2, 2, 2), "zb-v", 4, "one_program", Layout()),
        slow((1, 2, 4), "1f1b", 8, "one_program", Layout(sequence=True, overlap="ring")),
        slow((2, 4, 1), "gpipe", 2, "one_program", Layout(fsdp=True)),
        slow((2, 2, 2), "interleaved", 1, "one_program", Layout(sequence=True)),
        slow((2, 2, 2), "zb-h1", 2, "per_stage", ALL),
        slow((1, 2, 2, 2), "zb-h1", 2, "one_program", Layout(context="ring")),
        slow((2, 2, 1, 2), "1f1b", 2, "one_program", Layout(fsdp=True, context="all_gather")),
        slow((1, 2, 2, 2), "zb-v", 2, "per_stage", Layout(sequence=True, context="ulysses")),
    ],
    ids=str,
)
def test_loss_and_every_gradient_equal_those_of_one_device(
    one_device, axes, name, microbatches, executor, layout
):
    """In float64; rows hold from none to all of their labels."""
    mesh, rows = mesh_of(*axes), random_rows()
    schedule = pipelined.schedule_of(name, axes[1], microbatches)
    pipelined.check(layout, DEEP, mesh, len(rows.tokens), rows.tokens.shape[1], schedule)
    with jax.enable_x64(True):
        params = wide_params()
        stages = lambda x: x.reshape(schedule.stages, -1, *x.shape[1:])
        layers = by_rank(jax.tree.map(stages, params["layers"]), schedule)
        placed = pipelined.placement(layout, DEEP, mesh, schedule)
        args = (
            jax.device_put({**params, "layers": layers}, placed),
            parallel.place_rows(rows, mesh),
        )
        f: Any = pipelined.gradients(DEEP, mesh, layout, "f32", schedule, executor)
        if executor == "one_program":
            f = f.lower(*args).compile(compiler_options=UNOPTIMISED)
        loss, grads = settle(f(*args))
        found = jax.device_get((loss, pipelined.at_rest(grads, schedule)))
    paths = jax.tree.leaves_with_path(found)
    for (path, a), b in zip(paths, jax.tree.leaves(one_device), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(b).max(), err_msg=name)


# ---- runs ----------------------------------------------------------------------------------------

CONFIG = dataclasses.replace(
    TINY,
    model=dataclasses.replace(TINY.model, layers=4),
    steps=6,
    save_every=3,
)
PIPELINE = dict(pp=2, dp=2, tp=2, schedule="zb-v", microbatches=2)


def losses_in(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["one_program", "per_stage"])
def test_a_run_goes_on_with_another_schedule_or_none_and_its_losses_are_those_of_one_device(
    tmp_path, executor
):
    """Three steps in a V, three without a pipeline; and the other way round."""
    rows = pack(some_documents(), CONFIG.length)
    one = make_mesh(dp=1, tp=1, devices=jax.devices()[:1])
    plain = np.array([loss for _, loss in train.training(CONFIG, one, rows)])
    layout = Layout(fsdp=True)
    pipeline = dataclasses.replace(CONFIG, **PIPELINE, layout=layout, executor=executor)
    state: Any = None
    for i, (first, then) in enumerate([(pipeline, CONFIG), (CONFIG, pipeline)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        train.fit(first, train.mesh_for(first), rows, folder, StopAfter(3))
        state, done = train.fit(then, train.mesh_for(then), rows, folder, Stop())
        assert done == 6
        np.testing.assert_allclose(losses_in(folder), plain, rtol=0, atol=2e-5)
    mesh = train.mesh_for(pipeline)
    valid = train.evaluate(pipeline, mesh, state["params"], rows)
    host = jax.device_get(state["params"])
    total, labels = once(partial(llama.loss, config=CONFIG.model), host, rows)
    assert valid == pytest.approx(float(total / labels), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16"])
def test_precision_is_that_of_no_pipeline(policy):
    rows = pack(some_documents(), CONFIG.length)
    config = dataclasses.replace(CONFIG, precision=policy)
    pipeline = dataclasses.replace(config, **PIPELINE)
    curves = [
        np.array([loss for _, loss in train.training(c, train.mesh_for(c), rows)])
        for c in (config, pipeline)
    ]
    np.testing.assert_allclose(*curves, rtol=0, atol=2e-2)


def test_layers_rest_in_the_models_order():
    """A V's ranks own the first and the last; moments go with their parameters."""
    schedule, mesh = pipelined.schedule_of("zb-v", 2, 2), mesh_of(2, 2, 2)
    layout = Layout(fsdp=True)
    placed = pipelined.placement(layout, DEEP, mesh, schedule)
    make = partial(pipelined.first_params, DEEP, schedule)
    init = jax.jit(make, out_shardings=placed, compiler_options=UNOPTIMISED)
    params = init(jax.random.key(0))
    rest = pipelined.at_rest({"params": params, "moments": (params, 3)}, schedule)
    true = once(partial(llama.init, DEEP), jax.random.key(0))
    for found in (rest["params"], rest["moments"][0]):
        jax.tree.map(np.testing.assert_array_equal, found, true)
    back = pipelined.in_ranks(rest, schedule)
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim) and bool((a == b).all())
    assert all(jax.tree.leaves(jax.tree.map(same, back["params"], params)))
    whole, plain = pipelined.flat(mesh, layout)
    moved = jax.device_put(rest["params"], parallel.placement(plain, DEEP, whole))
    jax.tree.map(np.testing.assert_array_equal, moved, true)


def test_schedules_have_names_or_files(tmp_path):
    assert pipelined.schedule_of("zb-h1", 2) == zb_h1(2, 4)
    for name in ("mine.csv", "mine.txt"):
        zb_h1(2, 3).save(tmp_path / name)
        assert pipelined.schedule_of(str(tmp_path / name), 2) == zb_h1(2, 3)
    torch = tmp_path / "torch.csv"
    torch.write_text("0UNSHARD,0F0,,0RECV_B0,0B0,0REDUCE_GRAD\n".replace("0RECV_B0,", ""))
    assert str(pipelined.schedule_of(str(torch), 1, 1)) == "F0 B0"
    with pytest.raises(ValueError, match=r"of 2 ranks and 3 microbatches, and .* pp=2 and 8 micro"):
        pipelined.schedule_of(str(tmp_path / "mine.csv"), 2, 8)
    with pytest.raises(ValueError, match=r"schedule=zb-h3 is neither a file nor one of gpipe, 1f1"):
        pipelined.schedule_of("zb-h3", 2)


def test_what_does_not_compose_is_refused():
    for changes, words in (
        (dict(layout=Layout(keep=True, fsdp=True)), "layout.keep would keep layers"),
        (dict(layout=Layout(microbatches=2)), "a pipeline's are --microbatches"),
        (dict(microbatches=3), "batch=8 is no multiple of dp=2 × 3 microbatches"),
        (dict(schedule="interleaved", model=TINY.model), "layers=2 is no multiple of the 4 stages"),
        (dict(layout=Layout(fsdp=True, ahead=2)), "layout.ahead=2 is more than the 1 layers"),
        (dict(layout=Layout(sequence=True), length=47), "length=47 is not a multiple of tp=2"),
    ):
        config = dataclasses.replace(CONFIG, **{**PIPELINE, **changes})
        with pytest.raises(ValueError, match=re.escape(words)):
            train.mesh_for(config)
    for changes, words in (
        (dict(schedule="1f1b"), "schedule and microbatches are a pipeline's: set pp too"),
        (dict(microbatches=2), "layout.microbatches is in how many parts a device works"),
        (dict(pp=0), "pp=0 must be above 0"),
        (dict(pp=2, executor="per_stage", explain="a.html"), "executor=per_stage has many"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            train.check(dataclasses.replace(CONFIG, **changes))
