"""Steps of examples/train.py in any layout: what one is said to take, and what it takes.

What plan_gpu.py and scaling_gpu.py stand on. A step is loss and gradients of `pipelined.gradients`,
then `updates.update_of`. All rows of a batch are the same random tokens, one document: so the loss
after so many steps is the same for every layout of a model, however many rows it takes.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax  # noqa: E402
import numpy as np  # noqa: E402

import llama  # noqa: E402
import parallel  # noqa: E402
import pipelined  # noqa: E402
import planned  # noqa: E402
import updates  # noqa: E402
from xform.sharding import make_mesh, plan, settle  # noqa: E402
from xform.train.data import Rows  # noqa: E402

BILLION = llama.Config(
    codes=32_768, layers=16, width=2048, heads=16, kv_heads=8, head_size=128, hidden=8192
)


@dataclass(frozen=True)
class Row:
    """A layout to measure.

    Attributes:
      name: what the table calls it.
      axes: sizes of the mesh.
      layout: what the example splits.
      rows: in a batch.
      microbatches: of a pipeline, whose schedule is 1F1B.
      executor: of a pipeline.
    """

    name: str
    axes: dict[str, int]
    layout: parallel.Layout
    rows: int
    microbatches: int | None = None
    executor: pipelined.Executor = "per_stage"

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def schedule(self) -> Any:
        if "pp" not in self.axes:
            return None
        return pipelined.schedule_of("1f1b", self.axes["pp"], self.microbatches)

    @property
    def one_program(self) -> bool:
        """Whether loss and gradients are one program."""
        return self.schedule is None or self.executor == "one_program"

    def mesh(self) -> jax.sharding.Mesh:
        return make_mesh(**self.axes, devices=jax.devices()[: self.devices])

    def gradients(self, model: llama.Config, mesh: jax.sharding.Mesh, policy: str) -> Callable:
        """Loss and gradients of parameters and rows."""
        return pipelined.gradients(
            model, mesh, self.layout, policy, self.schedule, executor=self.executor
        )


@dataclass(frozen=True)
class Measured:
    """What a row took.

    Attributes:
      seconds: of the median step.
      ready: seconds until the first step was done.
      losses: of the first step, before any update, and of the last.
      assigned: bytes of a device that XLA gave to the state, gradients and all between; NaN where
        they are several programs.
      peak: bytes of the first device at most, in this process so far.
    """

    seconds: float
    ready: float
    losses: tuple[float, float]
    assigned: float
    peak: int


def heading() -> str:
    """The devices, the versions and the commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}, "
        f"Python {platform.python_version()}, commit {commit or 'unknown'}"
    )


def predicted(row: Row, model: llama.Config, length: int) -> plan.Plan:
    """What the planner says of a row, in bfloat16."""
    fused = model.fuse is not False
    split = planned.layout_of(row.axes, row.layout, row.schedule, fused=fused)
    split = replace(split, lockstep=row.schedule is not None and row.one_program)
    shape, on = plan.Model.of(model, length), plan.machine("H200", row.devices)
    return plan.predict(shape, on, split, row.rows * length, must_fit=False)


def batch(rows: int, length: int, codes: int) -> Rows:
    """Random tokens, one document a row, all rows alike."""
    tokens = np.random.default_rng(0).integers(0, codes, (1, length), np.int32)
    tokens = np.repeat(tokens, rows, axis=0)
    return Rows(tokens, np.zeros_like(tokens), np.roll(tokens, -1, axis=1))


def bytes_of(tree: Any) -> int:
    """Of the fullest part of a tree of arrays, or of their shapes and shardings, on one device."""
    part = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(part, jax.tree.leaves(tree)))


def measured(
    row: Row, model: llama.Config, length: int, steps: int, policy: str = "bf16"
) -> Measured:
    """Takes `steps` steps after two that warm up."""
    start, mesh = time.perf_counter(), row.mesh()
    optimizer = updates.optimizer(3e-4, 1000, 0.1)
    state = updates.first_state(model, mesh, row.layout, row.schedule, optimizer)
    rows = parallel.place_rows(batch(row.rows, length, model.codes), mesh)
    grads_of: Any = row.gradients(model, mesh, policy)
    assigned = math.nan
    if row.one_program:
        grads_of = grads_of.lower(state["params"], rows).compile()
        if found := grads_of.memory_analysis():
            assigned = bytes_of(state["optimizer"]) + found.argument_size_in_bytes
            assigned += found.output_size_in_bytes + found.temp_size_in_bytes
    update = updates.update_of(optimizer)

    def step(state):
        loss, grads = settle(grads_of(state["params"], rows))
        return settle(update(state, loss, grads))

    taken, losses, ready = [], [], 0.0
    for i in range(steps + 2):
        before = time.perf_counter()
        state, loss = jax.block_until_ready(step(state))
        taken.append(time.perf_counter() - before)
        losses.append(float(loss))
        if not i:
            ready = time.perf_counter() - start
    assert np.isfinite(losses).all()
    used = jax.devices()[0].memory_stats() or {}
    peak = used.get("peak_bytes_in_use", 0)
    return Measured(median(taken[2:]), ready, (losses[0], losses[-1]), assigned, peak)
