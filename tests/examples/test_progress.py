"""What is said beside the steps of a run, and never ends it."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("grain")
pytest.importorskip("optax")
pytest.importorskip("rich")

import llama
import progress
from settings import Config
from xform import cost


def test_utilisations_that_can_not_be_true_are_not_said(capsys, monkeypatch):
    """A CPU may have been measured in a busy moment, and a device be none of those known."""
    of = lambda size: cost(lambda x: x @ x)(jax.ShapeDtypeStruct((size, size), jnp.float32))
    costs, big = of(8), of(10**6)
    steps = [(i, i - 1, 2.0) for i in (49, 50)]
    run = lambda costs: [x[:3] for x in progress.shown(Config(), iter(steps), 48, (costs, costs))]
    assert run(costs) == steps
    assert "MFU" in capsys.readouterr().out
    assert run(big) == steps
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert "FU" not in said

    def unknown(*args, **options):
        raise ValueError("`device` knows A100, and cpu; found 'GeForce'")

    monkeypatch.setattr(progress, "mfu", unknown)
    monkeypatch.setattr(progress, "hfu", unknown)
    assert run(costs) == steps


def test_a_forecast_measures_the_device_before_any_step(monkeypatch):
    """It takes seconds, and would be found to hang in a step."""
    asked = []
    monkeypatch.setattr(progress, "device", lambda: asked.append(1))
    monkeypatch.setattr(progress, "counted", lambda *args: (0, lambda: asked.append(2)))
    progress.forecast(Config(), progress.make_mesh(dp=8, tp=1))
    assert asked == [1, 2]


def test_attention_that_a_mesh_splits_along_the_sequence_counts_as_that_of_one_device(monkeypatch):
    """A part of a zigzag sees keys after its queries' indices; the model is causal all the same."""
    monkeypatch.setattr(progress, "device", lambda: None)
    monkeypatch.setattr(progress, "memory", lambda grads: lambda *args: "")
    model = llama.Config(layers=1, width=16, heads=2, kv_heads=1, head_size=8, hidden=32)
    config = Config(model=model, batch=2, length=16)
    mesh = progress.make_mesh(dp=1, cp=2, tp=1, devices=jax.devices()[:2])
    _, counted = progress.forecast(config, mesh)
    assert counted.model_flops == 2 * 16 * llama.flops_per_token(model, 16)
