"""What train.py says of a run beforehand, and beside it: its costs, its speed, how far it is."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import llama
import parallel
import pipelined
from settings import Config
from xform import Costs, cost, device, hfu, memory, mfu
from xform.sharding import make_mesh


def forecast(config: Config, mesh: Mesh) -> tuple[Costs, Costs]:
    """Prints what loss and gradients cost and need, before anything is compiled.

    Of a pipeline, what they cost and need without it.

    Returns:
      Costs of what runs, and those of the model alone, on one device: of experts that a mesh or a
      capacity gives places, some of which stay empty, only what the tokens' choices cost; and of
      attention that a mesh splits along the sequence, where a part's mask is not causal, half.
    """
    with suppress(ValueError):  # of a device that nobody knows, there are no shares
        device()  # which measures a CPU: it takes seconds, for which no step is to wait
    mesh, layout = pipelined.flat(mesh, config.layout)
    costs, needs = counted(config, config.model, mesh, layout)
    print(f"{costs}\n{needs()}")
    if not config.model.experts and mesh.shape.get("cp", 1) == 1:
        return costs, costs
    model = dataclasses.replace(config.model, capacity=None)
    one = make_mesh(dp=1, tp=1, ep=1, devices=mesh.local_devices[:1])
    return costs, counted(config, model, one, parallel.PLAIN)[0]


def counted(config: Config, model: llama.Config, mesh: Mesh, layout: parallel.Layout):
    """Returns what loss and gradients of a model cost on a mesh, and what tells their memory."""
    size = config.batch, config.length
    params, rows = pipelined.shapes(layout, model, mesh, None, size)
    grads = parallel.gradients(model, mesh, layout, "f32")
    return cost(grads)(params, rows), partial(memory(grads), params, rows)


def share(of: Callable[..., Any], costs: Costs, seconds: float, devices: int) -> str:
    """Returns a utilisation in words; nothing where there is none that can be true.

    The device may be one that xform does not know. And a CPU that was measured in a busy moment can
    do more than it could then.
    """
    try:
        found = of(costs, seconds, devices=devices)
    except ValueError:
        return ""
    return f"{found.name} {found:.0%}"


def shown(
    config: Config, steps: Iterator[tuple[int, int, float]], done: int, costs: tuple[Costs, Costs]
) -> Iterator[tuple[int, int, float, float | None]]:
    """Passes the steps on, with tokens per second, beside a progress bar."""
    tokens, (ran, model) = config.batch * config.length, costs
    # Virtual CPU devices share their cores, so that one of them has the peak of all.
    devices = 1 if jax.default_backend() == "cpu" else ran.devices
    columns = ("step {task.completed}/{task.total}", BarColumn(), "{task.description}")
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=config.steps, completed=done)
        start = last = 0.0
        for i, (done, number, loss) in enumerate(steps):
            # The first step compiles: time counts from its end.
            now = time.perf_counter()
            start = start or now
            if i:
                seconds = (now - start) / i
                used = [share(f, c, seconds, devices) for f, c in ((mfu, model), (hfu, ran))]
                status = f"loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  {'  '.join(used)}"
                bar.update(task, completed=done, description=status)
                if done % 50 == 0:
                    bar.print(f"step {done:4}  {status}")
            yield done, number, loss, tokens / (now - last) if i else None
            last = time.perf_counter()
