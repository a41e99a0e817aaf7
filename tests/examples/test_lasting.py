"""A run goes back from a bad step, leaves its batch out, and remembers that."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import llama

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import steps
import train
from tests.examples.test_train import StopAfter, some_documents
from xform.sharding import make_mesh
from xform.train import run
from xform.train.checkpoint import Checkpoints
from xform.train.clock import process_start
from xform.train.data import batch, pack
from xform.train.recovery import skipped_of
from xform.train.replay import Corruption
from xform.train.run import Stop

CONFIG = train.Config(
    model=llama.Config(layers=1, width=16, heads=2, kv_heads=2, head_size=8, hidden=16),
    steps=30, batch=4, length=16, learning_rate=1e-3, save_every=4,
)  # fmt: skip
ROWS = pack(some_documents(), CONFIG.length)


def mesh_of(dp: int):
    return make_mesh(dp=dp, tp=1, devices=jax.devices("cpu")[:dp])


def lines_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fit(folder: Path, *, dp: int = 1, stop: Stop | None = None, **changed):
    """Trains in a folder, or goes on there; returns the lines."""
    config = dataclasses.replace(CONFIG, **changed)
    resume = (folder / "run.json").exists()
    run.begin(folder, dataclasses.asdict(config), resume=resume)
    train.fit(config, mesh_of(dp), ROWS, folder, Stop() if stop is None else stop)
    return lines_in(folder)


@pytest.fixture
def bad(monkeypatch):
    """Makes the loss of some batches another, as hardware or data might, and notes the batches."""
    losses, seen = {}, []
    programs = steps.programs

    def broken(config, mesh):
        grads_of, update = programs(config, mesh)
        numbers = {
            batch(ROWS, i, size=4, seed=0).tokens.tobytes(): i for i in range(config.steps + 9)
        }

        def of(params, rows):
            number = numbers[np.asarray(rows.tokens).tobytes()]
            seen.append(number)
            loss, grads = grads_of(params, rows)
            return loss * losses.get(number, 1.0), grads

        return of, update

    monkeypatch.setattr(steps, "programs", broken)
    return losses, seen


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(math.nan, id="no number"),
        pytest.param(4.0, id="a jump", marks=pytest.mark.slow),
    ],
)
def test_a_bad_batch_is_left_out_for_good(tmp_path, bad, factor, capsys):
    losses, seen = bad
    losses[25] = factor
    fit(tmp_path / "a", stop=StopAfter(28))  # step 25 is made twice
    assert len(lines_in(tmp_path / "a")) == 27
    lines = fit(tmp_path / "a")
    assert [x["step"] for x in lines] == list(range(1, 31))
    assert [x["batch"] for x in lines] == [*range(25), *range(26, 31)]
    # Back from step 26 to the checkpoint of 24, whose next batch comes once more.
    assert seen == [*range(26), 24, *range(26, 31)]
    (skip,) = run.read_run(tmp_path / "a")["skipped"]
    with Checkpoints(tmp_path / "a" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.info()["sample"] == 31 * CONFIG.batch, "the next one, one left out"
    assert (skip["batch"], skip["step"]) == (25, 26)
    assert skip["reason"].startswith("step 26 ")
    assert "back at step 24, without batch 25" in capsys.readouterr().out
    assert lines[25]["seconds"].get("lost", 0) == 0
    assert lines[24]["seconds"]["lost"] > 0, "what came after 24, and is made once more"
    # A run that knew it from the beginning has the same losses.
    losses.clear()
    run.begin(tmp_path / "b", {})
    run.note(tmp_path / "b", skipped=[skip])
    assert [x["loss"] for x in fit(tmp_path / "b")] == [x["loss"] for x in lines]


@pytest.mark.slow
def test_a_run_that_is_bad_again_and_again_ends(tmp_path, bad):
    losses, _ = bad
    losses.update(dict.fromkeys(range(2, 9), math.nan))
    with pytest.raises(FloatingPointError, match="step 3 is not finite, and changed") as error:
        fit(tmp_path, max_skips=3, steps=6)
    assert skipped_of(run.read_run(tmp_path)) == {2, 3, 4}
    (note,) = error.value.__notes__
    assert note.startswith("the last step that is saved is None, 3 batches are left out. Lower ")


def test_the_time_of_a_run_adds_up(tmp_path):
    lines = fit(tmp_path, steps=6)
    spent = sum(sum(line["seconds"].values()) for line in lines)
    assert spent == pytest.approx(lines[-1]["time"] - process_start(), abs=0.05)
    assert {"start", "compile", "data"} <= lines[0]["seconds"].keys()
    assert {"data", "step", "other"} <= lines[1]["seconds"].keys()
    assert lines[4]["seconds"]["save"] > 0, "of step 4, which comes after its line"
    before = lines[3]["time"]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest == 6
    # As if the last checkpoint had not come about.
    (tmp_path / "checkpoints" / "6").rename(tmp_path / "6")
    lines = fit(tmp_path, steps=6)
    assert len(lines) == 6
    # This process began before those lines: nothing is lost between them and its beginning.
    assert lines[3]["time"] == before
    assert "lost" not in lines[4]["seconds"] or lines[4]["seconds"]["lost"] == 0


@pytest.mark.slow
def test_replicas_are_compared_now_and_then(tmp_path, monkeypatch):
    plain = fit(tmp_path / "plain", dp=4, steps=6)
    lines = fit(tmp_path / "replayed", dp=4, steps=6, replay_every=2)
    assert [x["loss"] for x in lines] == [x["loss"] for x in plain]
    assert [("replay" in x["seconds"]) for x in lines] == [False, True] * 3

    programs = steps.programs

    def broken(config, mesh):
        """Whose first replica adds something to the norm of the rows that it has."""
        grads_of, update = programs(config, mesh)

        def of(params, rows):
            loss, grads = grads_of(params, rows)
            first = np.asarray(rows.labels)[0].max() >= 0
            return loss, {**grads, "norm": grads["norm"] + 1e-7 * first}

        return of, update

    monkeypatch.setattr(steps, "programs", broken)
    with pytest.raises(Corruption, match=r"step 4: replicas 0 and 1 differ .*`1/norm` in \d+ pla"):
        fit(tmp_path / "broken", dp=4, steps=6, replay_every=4)
    with pytest.raises(ValueError, match="replay_every compares replicas, and dp=1 is one"):
        train.check(dataclasses.replace(CONFIG, replay_every=2, dp=1))


def test_steps_are_profiled(tmp_path):
    fit(tmp_path, steps=3, profile=(2, 3))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_what_can_not_be_watched_is_refused():
    wrong = dict(hang=0.0, slow=1.0, spike=-1.0, max_skips=-1, profile=(5, 3), replay_every=0)
    with pytest.raises(ValueError, match="config: ") as error:
        train.check(dataclasses.replace(CONFIG, **wrong))
    for words in (
        "hang=0.0 must be a number above 0",
        "slow=1.0 must be a number above 1",
        "spike=-1.0 must be a number above 0",
        "max_skips=-1 must be at least 0",
        "profile=5 to 3 must be steps from 1, in order",
        "replay_every=0 must be above 0",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match="profile ends at step 40, and the run at 30"):
        train.check(dataclasses.replace(CONFIG, profile=(29, 40)))
    experts = dataclasses.replace(CONFIG, replay_every=2, model=llama.Config(experts=4))
    with pytest.raises(ValueError, match="replay_every compares replicas, and losses of experts"):
        train.check(experts)
