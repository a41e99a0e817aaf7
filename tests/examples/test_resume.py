"""A run that stops at any step goes on: bit by bit on its mesh, to 1e-5 of the loss on another."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

pytest.importorskip("grain")
pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import optax
import optax.contrib

import llama
import steps
import train
import updates
from parallel import Layout
from tests.examples.test_train import StopAfter
from xform.sharding import make_mesh
from xform.train.data import encode, pack

STEPS = 9
TINY = train.Config(
    model=llama.Config(layers=2, width=32, heads=8, kv_heads=4, head_size=8, hidden=64),
    steps=STEPS, batch=8, length=48, learning_rate=1e-3, save_every=100,
)  # fmt: skip


class On(NamedTuple):
    """What a part of a run is on: a mesh, and the options of the model on it."""

    mesh: dict[str, int]
    options: dict


WIDE = On(dict(dp=4, tp=2), {})
CUBE = On(dict(dp=2, cp=2, tp=2), dict(layout=Layout(context="ring")))
ONE = On(dict(dp=1, tp=1), {})
SPLIT = On(dict(dp=4, tp=2), dict(layout=Layout(fsdp=True, sequence=True)))
PIPE = On(dict(dp=2, pp=2, tp=2), dict(pp=2, schedule="1f1b", microbatches=4))
LONG_PIPE = On(dict(dp=1, pp=2, tp=2), dict(pp=2, schedule="zb-h1", microbatches=2))


def rows():
    text = "".join(inspect.getsource(file) for file in (llama, train))
    return pack([encode(part) for part in text.split("\n\n\n")], TINY.length)


def run_on(folder: Path, *parts: tuple[On, int], config=TINY) -> tuple[np.ndarray, dict]:
    """Losses of all steps, and the state at the end, of a run that each part does some steps of."""
    folder.mkdir()
    done, state = 0, {}
    for on, until in parts:
        asked = dataclasses.replace(config, **on.options)
        devices = jax.devices("cpu")[: int(np.prod(list(on.mesh.values())))]
        mesh = make_mesh(**on.mesh, devices=devices)
        state, done = train.fit(asked, mesh, rows(), folder, StopAfter(until - done))
        assert done == until
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    return np.array([json.loads(line)["loss"] for line in lines]), state


def random_stops(seed: int, count: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return sorted(rng.choice(np.arange(1, STEPS), count, replace=False).tolist())


def begun_on(on: On) -> dict:
    """The first state, as it rests in a checkpoint."""
    config = dataclasses.replace(TINY, **on.options)
    devices = jax.devices("cpu")[: int(np.prod(list(on.mesh.values())))]
    state = train.first_state(config, make_mesh(**on.mesh, devices=devices))
    return jax.device_get(train.pipelined.at_rest(state, train.schedule_for(config)))


@pytest.mark.parametrize(
    "on",
    [SPLIT, *(pytest.param(on, marks=pytest.mark.slow) for on in (WIDE, CUBE, PIPE, LONG_PIPE))],
)
def test_it_begins_with_the_same_state_on_every_mesh(on):
    """Bit by bit, without a checkpoint that another run would have to make first."""
    jax.tree.map(np.testing.assert_array_equal, begun_on(on), begun_on(ONE))


@pytest.mark.slow
@pytest.mark.parametrize("on", [WIDE, CUBE, SPLIT, PIPE], ids=lambda on: "x".join(on.mesh))
@pytest.mark.parametrize("seed", [0, 1])
def test_it_goes_on_bit_by_bit_on_the_same_mesh(tmp_path, on, seed):
    whole = run_on(tmp_path / "whole", (on, STEPS))
    stops = random_stops(seed, 3)
    broken = run_on(tmp_path / "broken", *((on, step) for step in (*stops, STEPS)))
    assert len(set(whole[0])) == STEPS
    jax.tree.map(np.testing.assert_array_equal, broken, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        (WIDE, ONE),
        (WIDE, CUBE, ONE),
        (CUBE, WIDE, SPLIT),
        (ONE, PIPE, WIDE),
        (SPLIT, LONG_PIPE, PIPE, CUBE),
    ],
    ids=lambda path: "-".join("x".join(f"{k}{v}" for k, v in on.mesh.items()) for on in path),
)
def test_it_goes_on_with_the_same_losses_on_other_meshes(tmp_path, path):
    whole, _ = run_on(tmp_path / "whole", (path[-1], STEPS))
    stops = random_stops(len(path), len(path) - 1)
    moved, _ = run_on(tmp_path / "moved", *zip(path, (*stops, STEPS), strict=True))
    np.testing.assert_allclose(moved, whole, rtol=0, atol=1e-5)


MOE = dataclasses.replace(TINY.model, experts=4, top_k=2, hidden=32)
OPTIMIZERS = {
    "muon": lambda config: updates.partitioned(optax.contrib.muon(1e-3)),
    "adafactor": lambda config: optax.adafactor(1e-3),
    "ema": lambda config: optax.chain(optax.adamw(1e-3), optax.ema(0.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_go_on_bit_by_bit_and_on_another_mesh(tmp_path, monkeypatch, name):
    monkeypatch.setattr(steps, "optimizer_for", OPTIMIZERS[name])
    monkeypatch.setattr(steps, "programs", steps.programs.__wrapped__)  # which knows configs alone
    whole = run_on(tmp_path / "whole", (WIDE, STEPS))
    broken = run_on(tmp_path / "broken", (WIDE, 4), (WIDE, STEPS))
    jax.tree.map(np.testing.assert_array_equal, broken, whole)
    moved, _ = run_on(tmp_path / "moved", (WIDE, 4), (ONE, STEPS))
    np.testing.assert_allclose(moved, whole[0], rtol=0, atol=1e-5)


def test_an_optimizer_that_a_mesh_does_not_fit_is_refused_as_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "optimizer_for", lambda config: optax.contrib.muon(1e-3))
    with pytest.raises(Exception, match="Contracting dimensions are sharded") as error:
        run_on(tmp_path / "muon", (WIDE, STEPS))
    assert "wrap it in `updates.partitioned`" in "".join(error.value.__notes__)


@pytest.mark.slow
def test_experts_go_on_bit_by_bit_and_on_another_mesh(tmp_path):
    config = dataclasses.replace(TINY, model=MOE)
    dealt, two = On(dict(dp=1, tp=2, ep=4), {}), On(dict(dp=4, tp=1, ep=2), {})
    run = lambda name, *parts: run_on(tmp_path / name, *parts, config=config)
    whole = run("whole", (dealt, STEPS))
    jax.tree.map(np.testing.assert_array_equal, run("broken", (dealt, 4), (dealt, STEPS)), whole)
    moved, _ = run("moved", (dealt, 4), (two, STEPS))
    np.testing.assert_allclose(moved, whole[0], rtol=0, atol=1e-5)
