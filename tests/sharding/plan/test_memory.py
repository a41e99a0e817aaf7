"""What devices hold: held to the programs that XLA compiles for an H200, and to papers."""

import dataclasses
import math
from typing import Any

import jax
import pytest
from hypothesis import given, settings

import llama
import pipelined
import planned
from parallel import Layout
from tests.sharding.plan.shapes import SMALL, built, cases, predict
from xform.sharding import make_mesh, plan
from xform.sharding.plan._compute import kept

MIDDLE = llama.Config(
    codes=8192, layers=8, width=1024, heads=8, kv_heads=4, head_size=128, hidden=4096
)
LENGTH = 1024
# By name: the mesh, what the example splits, rows of a batch, microbatches of a pipeline.
LAYOUTS: dict[str, tuple[dict[str, int], Layout, int, int | None]] = {
    "one device": (dict(dp=1, tp=1), Layout(), 4, None),
    "fsdp=2": (dict(dp=2, tp=1), Layout(fsdp=True), 8, None),
    "tp=2": (dict(dp=1, tp=2), Layout(sequence=True), 4, None),
    "fsdp=2, tp=2": (dict(dp=2, tp=2), Layout(fsdp=True, sequence=True), 8, None),
    "pp=2": (dict(dp=1, pp=2, tp=1), Layout(), 8, 4),
    "pp=4": (dict(dp=1, pp=4, tp=1), Layout(), 16, 8),
    "pp=2, zb-h1": (dict(dp=1, pp=2, tp=1), Layout(), 8, 4),
    "cp=2": (dict(dp=1, cp=2, tp=1), Layout(), 4, None),
}
# Bytes of the programs that XLA compiles of these for an H200, each in a minute or two; the slow
# test makes them again.
COMPILED = {
    "one device": 4_470_104_580,
    "fsdp=2": 1_211_230_996,
    "tp=2": 2_360_640_516,
    "fsdp=2, tp=2": 688_947_988,
    "pp=2": 3_491_385_972,
    "pp=4": 2_664_684_404,
    "pp=2, zb-h1": 3_768_207_516,
    "cp=2": 3_091_271_204,
}


def schedule_of(name: str) -> Any:
    axes, _, _, microbatches = LAYOUTS[name]
    kind = "zb-h1" if "zb" in name else "1f1b"
    return microbatches and pipelined.schedule_of(kind, axes["pp"], microbatches)


def compiled(name: str) -> float:
    """Bytes of loss and gradients on one H200: arguments, results, and all between."""
    axes, layout, batch, _ = LAYOUTS[name]
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    schedule = schedule_of(name)
    shapes = pipelined.shapes(layout, MIDDLE, mesh, schedule, (batch, LENGTH))
    step = pipelined.gradients(MIDDLE, mesh, layout, "bf16", schedule)
    return plan.compiled_memory(step, *shapes).total


def predicted(name: str) -> float:
    """The same: all but the optimiser's state."""
    axes, layout, batch, microbatches = LAYOUTS[name]
    split = planned.layout_of(axes, layout, schedule_of(name))
    split = dataclasses.replace(split, lockstep=microbatches is not None)
    model, machine = plan.Model.of(MIDDLE, LENGTH), plan.machine("H200", split.devices)
    memory = predict(model, machine, split, batch * LENGTH).memory
    return memory.total - memory.optimizer


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_the_compiled_program(name):
    assert predicted(name) == pytest.approx(COMPILED[name], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_programs_are_what_is_written_down(name):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
    found = compiled(name)
    assert predicted(name) == pytest.approx(found, rel=0.05)
    if jax.__version__ == "0.11.2":
        assert found == pytest.approx(COMPILED[name], rel=0.01)


def test_memory_of_fused_programs_is_what_a_gpu_assigned():
    """A step of benchmarks/layouts.py on one H200: 41.2 GiB with state and moments, says XLA."""
    billion = llama.Config(
        codes=32_768, layers=16, width=2048, heads=16, kv_heads=8, head_size=128, hidden=8192
    )
    split = planned.layout_of(dict(dp=1, tp=1), Layout(), None, fused=True)
    found = predict(plan.Model.of(billion, 8192), plan.machine("H200", 1), split, 2 * 8192)
    assert found.memory.total / 2**30 == pytest.approx(41.2, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_memory_is_its_parts_and_grows_with_what_it_holds(case):
    model, machine, layout, tokens = built(case)
    found = predict(model, machine, layout, tokens).memory
    assert found.total == sum(found.parts.values())
    deep = dataclasses.replace(model, layers=2 * model.layers)
    more = predict(deep, machine, layout, tokens).memory
    assert more.parameters > found.parameters
    assert more.activations > found.activations
    rows = predict(model, machine, layout, 2 * tokens).memory
    assert rows.activations > found.activations
    assert rows.parameters == found.parameters
    if layout.zero < 3:
        further = dataclasses.replace(layout, zero=layout.zero + 1)
        less = predict(model, machine, further, tokens).memory
        held = lambda m: m.parameters + m.gradients + m.optimizer
        assert held(less) <= held(found)


def test_recompute_keeps_less():
    base = plan.Layout(attention="dense")
    each = [
        kept(SMALL, dataclasses.replace(base, recompute=how))
        for how in ("none", "attention", "full")
    ]  # pyright: ignore[reportArgumentType]
    assert each[0] > each[1] > each[2] > 0


def test_a_layer_keeps_what_megatrons_paper_says():
    """34 + 5 heads · length / width bytes a number of the stream, 2 once it is recomputed.

    (arXiv 2205.05198, equations 1 to 6; we leave out dropout's two masks behind the blocks.)
    """
    gpt = plan.Model(96, 12288, 96, 96, 128, 49152, 51_200, 2048, gated=False)
    layout = plan.Layout(attention="dense", precision="mixed16", recompute="none")
    scores = 5 * gpt.heads * gpt.length / gpt.width
    assert kept(gpt, layout) / gpt.width == pytest.approx(34 + scores, rel=0.03)
    selective = dataclasses.replace(layout, recompute="attention")
    assert kept(gpt, selective) / gpt.width == pytest.approx(34, rel=0.07)
    full = dataclasses.replace(layout, recompute="full")
    assert kept(gpt, full) / gpt.width == 2
