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

import dataclasses
import math
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hugging_face
import llama
import parallel
import pipelined
import progress
from lasting import Lasting, set_aside_unreadable
from reading import data_for as data_for
from reading import data_of, info_of, position, refuse_another, saved_of, tokenizer_for
from settings import Config, check, in_common, known_of, wrong_processes
from steps import explained as explained
from steps import first_state as first_state
from steps import gradients_for as gradients_for
from steps import optimizer_for as optimizer_for
from steps import schedule_for
from steps import training as training
from texts import complaint as complaint
from texts import sample as sample
from texts import show
from xform.sharding import cpu_devices, make_mesh, settle, shardings
from xform.train import files, processes, run
from xform.train.capture import Capture
from xform.train.checkpoint import Checkpoints
from xform.train.clock import Clock, Ledger, Pace
from xform.train.data import NO_LABEL, Source, count, first
from xform.train.metrics import Metrics, entries
from xform.train.tokens import TokenRows
from xform.train.watchdog import Watchdog

# ---- devices -------------------------------------------------------------------------------------


def mesh_for(config: Config) -> Mesh:
    """Returns the mesh of all devices, once it is known that model and batch divide over it."""
    count, schedule = jax.device_count() // (config.pp or 1), schedule_for(config)
    m = config.model
    tp = config.tp or math.gcd(2, count, m.codes, m.heads, m.kv_heads, m.hidden, m.shared)
    ep = config.ep or (1 if m.experts else None)
    dp = config.dp or max(1, count // (tp * (config.cp or 1) * (ep or 1)))
    mesh = make_mesh(dp=dp, pp=config.pp, cp=config.cp, tp=tp, ep=ep)
    if config.replay_every and dp < 2:
        raise ValueError("replay_every compares replicas, and the mesh has dp=1: leave it out.")
    pipelined.check(config.layout, config.model, mesh, config.batch, config.length, schedule)
    return mesh


# ---- training ------------------------------------------------------------------------------------


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


def refuse_others(checkpoints: Checkpoints, config: Config, info: dict) -> None:
    """Raises unless the newest checkpoint, if there is one, is of this config and this data."""
    if checkpoints.latest is not None:
        where = f"the checkpoint in `{checkpoints.folder}`"
        refuse_another(where, checkpoints.info(), config, info)


def fit(
    config: Config,
    mesh: Mesh,
    rows: Source,
    folder: Path,
    stop: run.Stop,
    info: dict | None = None,
    clock: Clock | None = None,
) -> tuple[dict, int]:
    """Trains until the last step, or until it is asked to stop; saves as it goes and at the end.

    What tells its checkpoints from those of others, `info`, takes a look at all data.

    Returns:
      The state, as it rests, and how many steps it has seen.
    """
    info, clock, own = info or info_of(config, rows), clock or Clock(), processes.own(folder)
    keeping = Checkpoints(folder / "checkpoints", keep=config.keep, keep_every=config.keep_every)
    with keeping as checkpoints, processes.each_for_itself(__file__):
        refuse_others(checkpoints, config, info)
        lasting = Lasting(config, mesh, rows, folder, checkpoints)
        if config.resume:
            print(f"it goes on from step {lasting.done or '0: none is saved'}")
        costs, pace = progress.forecast(config, mesh), Pace(config.slow)
        with (
            Metrics(own, PANELS, done=lasting.done, tensorboard=config.tensorboard) as metrics,
            Capture(own / "profile", config.profile) as capture,
        ):
            clock.lost_before(metrics.last_time or run.first_start(folder))
            steps = lasting.steps(metrics, clock, capture)
            for done, number, loss, rate in progress.shown(config, steps, lasting.done, costs):
                seconds, values = clock.lap(), dict(loss=loss, tokens_per_second=rate, batch=number)
                metrics.write(done, **values, time=clock.time, seconds=seconds)
                if slow := pace.warning(done, seconds):
                    print(slow)
                checkpoints.check()
                last = processes.asked_to(stop)  # asked once: what it is asked for is saved
                if last or done == config.steps or done % config.save_every == 0:
                    with clock.phase("save"):
                        at = position(config, mesh, done, lasting.skipped)
                        checkpoints.save(done, lasting.at_rest(), {**info, **at})
                if last:
                    break
    return lasting.at_rest(), lasting.done


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
    processes.wait("begin")
    return folder


def main(config: Config) -> None:
    """Trains, evaluates and samples, or goes on with that."""
    clock = Clock()
    processes.same("config", in_common(config))
    if config.resume:
        set_aside_unreadable(Path(config.run or run.newest_run()))
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
    processes.same(
        "data", {name: info[name] for name in ("data", "held_out", "order", "tokenizer")}
    )
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
    rank, ranks = jax.process_index(), jax.process_count()
    watchdog = Watchdog(clock, config.hang, rank=rank, ranks=ranks, folder=folder)
    with run.stopping() as stop, watchdog:
        processes.meet(config.processes)
        state, done = fit(config, mesh, rows, folder, stop, info, clock)
        clock.enter("end")
        print(Ledger.of(x["seconds"] for x in entries(folder / "metrics.jsonl") if "seconds" in x))
        if processes.asked_to(stop) and stop.signal:
            print(f"stopped after step {done}, which is saved; to go on: --run {folder} --resume")
            sys.exit(128 + stop.signal)
        tell(config, mesh, state, held_out, tokenizer)


def tell(
    config: Config, mesh: Mesh, state: dict, held_out: Source, tokenizer: files.Tokenizer | None
) -> None:
    """Prints what a model has learned, on data held out and in texts of its own."""
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
    processes.join(config.coordinator, config.processes, config.process)
    with processes.each_for_itself(__file__):
        main(config)


if __name__ == "__main__":
    with run.told(__file__):
        run_from_command_line()
