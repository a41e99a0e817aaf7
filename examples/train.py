"""Trains the model of llama.py, by default on the source code of Python's standard library.

    uv run --extra train examples/train.py
    uv run --extra train examples/train.py --tp 1 --steps 1000 --model.layers 8
    uv run --extra train examples/train.py --dp 4 --tp 2 --layout.fsdp \
        --layout.sequence --layout.overlap ring
    uv run --extra train examples/train.py --pp 2 --schedule zb-h1 --microbatches 8
    uv run --extra train examples/train.py --dp 2 --cp 2 --tp 2 --length 2048 --layout.context ring
    uv run --extra train examples/train.py --ep 4 --tp 2 --model.experts 8 --model.top-k 2 \
        --model.hidden 160 --model.shared 64
    uv run --extra train examples/train.py --data notes/ letters.txt
    uv run --extra train examples/train.py --data train.bin --held-out val.bin \
        --separator 50256 --model.codes 50257 --tokenizer tokenizer.json
    uv run --extra train examples/train.py --data books.parquet web.array_record --mixture 1 3
    uv run --extra train examples/train.py --weights llama/ --tokenizer llama/tokenizer.json
    uv run --extra train examples/train.py --resume

It runs on all accelerators that JAX finds, or on a CPU split into eight virtual devices, as a mesh
of `dp` (each a part of the batch) × `cp` (of each row, if there is one) × `tp` (of the matrices)
× `ep` (of the experts, if there are any, and of the batch); how, parallel.py says, and for `pp`
(each a part of the layers) pipelined.py. With `--processes`, as many as these share the mesh, each
with its own devices: all are given the same command but for their `--process`. What a run leaves is
a folder in `runs/`. Ctrl-C lets it finish and save its step; `--resume` goes on as if nothing had
happened.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import hugging_face
import llama
import parallel
import pipelined
import several
import updates
from reading import data_for as data_for
from reading import data_of, info_of, position, refuse_another, saved_of, tokenizer_for
from settings import Config, check, known_of, wrong_processes
from texts import complaint as complaint
from texts import sample as sample
from texts import show
from xform import Costs, cost, explain, hfu, memory, mfu, numerics
from xform.sharding import cpu_devices, make_mesh, settle, shardings
from xform.sharding.pipeline import Schedule
from xform.train import files, run
from xform.train.checkpoint import Checkpoints
from xform.train.data import NO_LABEL, Rows, Source, batch, batches, count, first, rows_here
from xform.train.metrics import Metrics
from xform.train.tokens import TokenRows

# ---- devices -------------------------------------------------------------------------------------


def schedule_for(config: Config) -> Schedule | None:
    """Returns the pipeline's schedule; None where there is no pipeline."""
    if config.pp is None:
        return None
    return pipelined.schedule_of(config.schedule or "1f1b", config.pp, config.microbatches)


def mesh_for(config: Config) -> Mesh:
    """Returns the mesh of all devices, once it is known that model and batch divide over it."""
    count, schedule = jax.device_count() // (config.pp or 1), schedule_for(config)
    m = config.model
    tp = config.tp or math.gcd(2, count, m.codes, m.heads, m.kv_heads, m.hidden, m.shared)
    ep = config.ep or (1 if m.experts else None)
    dp = config.dp or max(1, count // (tp * (config.cp or 1) * (ep or 1)))
    mesh = make_mesh(dp=dp, pp=config.pp, cp=config.cp, tp=tp, ep=ep)
    pipelined.check(config.layout, config.model, mesh, config.batch, config.length, schedule)
    return mesh


# ---- training ------------------------------------------------------------------------------------


def explained(f: Callable, file: str) -> Callable:
    """Returns `f`, which at its first call writes to a file what its compiled program runs."""

    def call(*args):
        if not Path(file).exists():
            explain(f)(*args).save(file)
        return f(*args)

    return call


def gradients_for(config: Config, mesh: Mesh) -> Callable:
    """Returns the loss and the gradients of parameters and rows, over the mesh."""
    c = config
    return pipelined.gradients(
        c.model, mesh, c.layout, c.precision, schedule_for(c), executor=c.executor
    )


def optimizer_for(config: Config) -> optax.GradientTransformation:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    return updates.optimizer(config.learning_rate, config.steps, config.weight_decay)


def first_state(config: Config, mesh: Mesh) -> dict:
    """Returns the parameters to begin with and the optimiser's state of them, all on the mesh."""
    schedule, optimizer = schedule_for(config), optimizer_for(config)
    return updates.first_state(
        config.model, mesh, config.layout, schedule, optimizer, config.seed, config.weights
    )


def training(
    config: Config, mesh: Mesh, rows: Source, saved: dict | None = None, done: int = 0
) -> Iterator[tuple[dict, float]]:
    """Yields state and loss of each step after those `done`; the next step reuses its memory.

    It begins with the state that was saved then, or with a fresh one.
    """
    grads_of = gradients_for(config, mesh)
    if config.explain:
        Path(config.explain).unlink(missing_ok=True)
        grads_of = explained(grads_of, config.explain)
    update = updates.update_of(optimizer_for(config))
    state = first_state(config, mesh) if saved is None else saved
    here = rows_here(shardings(mesh, parallel.specs_of_rows(mesh)), (config.batch, config.length))
    drawn: dict[str, Any] = dict(size=config.batch, seed=config.seed)
    reader = batches(rows, done, here=here, **drawn)
    for i, part in zip(range(done, config.steps), reader, strict=False):
        placed = parallel.place_rows(part, mesh)
        loss, grads = settle(grads_of(state["params"], placed))
        state, loss = settle(update(state, loss, grads))
        if not math.isfinite(loss):
            found = origin(config, mesh, state["params"], batch(rows, i, **drawn))
            raise FloatingPointError(f"step {i + 1} is not finite, and changed nothing:\n{found}")
        yield state, float(loss)


def origin(config: Config, mesh: Mesh, params: dict, rows: Rows) -> numerics.NonFinite:
    """Returns where numbers first were not finite, of parameters in training and of rows."""
    mesh, layout = pipelined.flat(mesh, config.layout)
    grads = parallel.gradients(config.model, mesh, layout, config.precision)
    params = pipelined.at_rest(params, schedule_for(config))
    params = jax.device_put(params, parallel.placement(layout, config.model, mesh))
    return numerics.find_nonfinite(grads)(params, parallel.place_rows(rows, mesh))


def evaluate(config: Config, mesh: Mesh, params: dict, rows: Source) -> float:
    """Returns the mean loss of all labels in the rows, in nats, with parameters as they rest."""
    mesh, layout = pipelined.flat(mesh, config.layout)
    params = jax.device_put(params, parallel.placement(layout, config.model, mesh))
    sums = parallel.sums(config.model, mesh, layout)
    total, labels, used = 0.0, 0, first(rows, config.held_out_rows)
    for i in range(0, len(used), config.batch):
        chosen = np.arange(i, i + config.batch)
        part = rows.take(used[chosen % len(used)])
        part.labels[chosen >= len(used)] = NO_LABEL
        loss, found = settle(sums(params, parallel.place_rows(part, mesh)))
        total, labels = total + float(loss), labels + int(found)
    return total / labels


# ---- a run ---------------------------------------------------------------------------------------

PANELS = {"loss": "loss (nats per token)", "tokens_per_second": "tokens per second"}


def forecast(config: Config, mesh: Mesh) -> tuple[Costs, Costs]:
    """Prints what loss and gradients cost and need, before anything is compiled.

    Of a pipeline, what they cost and need without it.

    Returns:
      Costs of what runs, and those of the model alone, on one device: of experts that a mesh or a
      capacity gives places, some of which stay empty, only what the tokens' choices cost.
    """
    mesh, layout = pipelined.flat(mesh, config.layout)
    costs, needs = counted(config, config.model, mesh, layout)
    print(f"{costs}\n{needs()}")
    if not config.model.experts:
        return costs, costs
    model = dataclasses.replace(config.model, capacity=None)
    one = make_mesh(dp=1, tp=1, ep=1, devices=mesh.local_devices[:1])
    return costs, counted(config, model, one, parallel.PLAIN)[0]


def counted(config: Config, model: llama.Config, mesh: Mesh, layout: parallel.Layout):
    """Returns what loss and gradients of a model cost on a mesh, and what tells their memory."""
    struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.eval_shape(partial(llama.init, model), jax.random.key(0))
    params = jax.tree.map(struct, params, parallel.placement(layout, model, mesh))
    shape = (config.batch, config.length)
    rows = jax.eval_shape(lambda: Rows(*[np.zeros(shape, np.int32)] * 3))
    placed = shardings(mesh, parallel.specs_of_rows(mesh))
    rows = jax.tree.map(lambda x: struct(x, placed), rows)
    grads = parallel.gradients(model, mesh, layout, "f32")
    return cost(grads)(params, rows), partial(memory(grads), params, rows)


def watched(
    config: Config, steps: Iterator[tuple[dict, float]], done: int, costs: tuple[Costs, Costs]
) -> Iterator[tuple[int, dict, float, float | None]]:
    """Passes the steps on, with their numbers and tokens per second, beside a progress bar."""
    tokens, (ran, model) = config.batch * config.length, costs
    # Virtual CPU devices share their cores, so that one of them has the peak of all.
    devices = 1 if jax.default_backend() == "cpu" else ran.devices
    columns = ("step {task.completed}/{task.total}", BarColumn(), "{task.description}")
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=config.steps, completed=done)
        start = last = 0.0
        for i, (state, loss) in enumerate(steps):
            # The first step compiles: time counts from its end.
            now = time.perf_counter()
            start = start or now
            if i:
                seconds = (now - start) / i
                used = [f(c, seconds, devices=devices) for f, c in ((mfu, model), (hfu, ran))]
                shares = "  ".join(f"{share.name} {share:.0%}" for share in used)
                status = f"loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  {shares}"
                bar.update(task, completed=done + i + 1, description=status)
                if (done + i + 1) % 50 == 0:
                    bar.print(f"step {done + i + 1:4}  {status}")
            yield done + i + 1, state, loss, tokens / (now - last) if i else None
            last = time.perf_counter()


def restored(checkpoints: Checkpoints, state: dict, config: Config, info: dict) -> dict:
    """Returns the newest checkpoint, once it is known to be of this config and this data."""
    where = f"the checkpoint in `{checkpoints.folder}`"
    refuse_another(where, checkpoints.info(), config, info)
    return checkpoints.restore(state)


@contextlib.contextmanager
def told_what_is_saved(checkpoints: Checkpoints) -> Iterator[None]:
    """Adds to the error of a step that is not finite what there is to go back to."""
    try:
        yield
    except FloatingPointError as error:
        error.add_note(
            f"the last step that is saved is {checkpoints.latest}. Lower the learning rate, or "
            "look at the data."
        )
        raise


def fit(
    config: Config, mesh: Mesh, rows: Source, folder: Path, stop: run.Stop, info: dict | None = None
) -> tuple[dict, int]:
    """Trains until the last step, or until it is asked to stop; saves as it goes and at the end.

    What tells its checkpoints from those of others, `info`, takes a look at all data.

    Returns:
      The state, as it rests, and how many steps it has seen.
    """
    schedule = schedule_for(config)
    info = info or info_of(config, rows)
    keeping = partial(Checkpoints, keep=config.keep, keep_every=config.keep_every)
    with keeping(folder / "checkpoints") as checkpoints:
        before = checkpoints.latest or 0
        state = first_state(dataclasses.replace(config, weights=None) if before else config, mesh)
        if before:
            at_rest = pipelined.at_rest(state, schedule)
            state = restored(checkpoints, at_rest, config, info)
            state = pipelined.in_ranks(state, schedule)
        costs = forecast(config, mesh)
        steps, done = training(config, mesh, rows, state, before), before
        watching = told_what_is_saved(checkpoints)
        with Metrics(several.own(folder), PANELS, done=before) as metrics, watching:
            for done, state, loss, rate in watched(config, steps, before, costs):
                metrics.write(done, loss=loss, tokens_per_second=rate)
                last = several.asked_to(stop)  # asked once: what it is asked for is saved
                if last or done == config.steps or done % config.save_every == 0:
                    at_rest = pipelined.at_rest(state, schedule)
                    checkpoints.save(done, at_rest, {**info, **position(config, mesh, done)})
                if last:
                    break
    return pipelined.at_rest(state, schedule), done


def sizes_of(model: llama.Config, params: dict) -> tuple[int, int]:
    """Returns how many parameters there are, and how many of them a token meets."""
    every = sum(x.size for x in jax.tree.leaves(params))
    if not model.experts:
        return every, every
    expert = sum(params["layers"][name][:, 0].size for name in ("gate", "up", "down"))
    return every, every - (model.experts - model.top_k) * expert


def begin(config: Config, info: dict) -> Path:
    """Returns the run's folder, which the first process makes."""
    folder = Path(config.run or ".")
    if not jax.process_index():
        folder = run.begin(config.run, info["config"], more=info, resume=config.resume)
    several.wait()
    return folder


def main(config: Config) -> None:
    """Trains, evaluates and samples, or goes on with that."""
    saved = saved_of(config)
    if saved:
        refuse_another(*saved, config)
    check(config)
    if config.weights and not saved:
        hugging_face.check(config.weights, config.model)
    mesh = mesh_for(config)
    tokenizer = tokenizer_for(config)
    rows, held_out = data_of(config, tokenizer, saved)
    info = info_of(config, rows, held_out, tokenizer)
    if saved:
        refuse_another(*saved, config, info)
    layout = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    platform = mesh.devices.flat[0].platform
    size, read = sum(block.size for block in rows.blocks), ""
    if isinstance(rows, TokenRows):
        left = f" ({rows.left:,} more fill no row)" if rows.left else ""
        read = f"{left}, read as {rows.blocks[0].dtype}"
    print(f"{size:,} tokens in {count(rows):,} rows{read}; {platform} devices: {layout}")

    folder = begin(config, info)
    print(f"the run is in {folder}")
    with run.stopping() as stop:
        state, done = fit(config, mesh, rows, folder, stop, info)
    if stop.signal:
        print(f"stopped after step {done}, which is saved; to go on: --run {folder} --resume")
        sys.exit(128 + stop.signal)

    params = jax.device_put(state["params"], shardings(mesh, P()))
    every, active = sizes_of(config.model, params)
    print(f"parameters: {every:,}" + (f", {active:,} active" if active < every else ""))
    loss = evaluate(config, mesh, state["params"], held_out)
    unit = "byte" if tokenizer is files.BYTES else "token"
    print(f"validation loss: {loss:.3f} nats per {unit}, on data held out\n")
    if tokenizer and not jax.process_index():
        show(config, tokenizer, jax.device_get(params))


def from_command_line() -> Config:
    """Returns the config asked for; that of the run itself where one is resumed."""
    import tyro

    config = tyro.cli(Config)
    if config.weights and not config.resume:
        model = hugging_face.model_of(config.weights)
        return tyro.cli(Config, default=dataclasses.replace(Config(), model=model))
    if not config.resume:
        return config
    folder = config.run or str(run.newest_run())
    saved = known_of(run.read_run(folder)["config"])
    return tyro.cli(Config, default=dataclasses.replace(saved, run=folder, resume=True))


def run_from_command_line() -> None:
    """Does what the command line asks for, with the devices of this process."""
    config = from_command_line()
    if wrong := wrong_processes(config):
        raise ValueError(f"config: {'; '.join(wrong)}.")
    cpu_devices(max(1, 8 // config.processes))
    several.join(config.coordinator, config.processes, config.process)
    main(config)


if __name__ == "__main__":
    with run.told(__file__):
        run_from_command_line()
