"""Trains the model of llama.py on the source code of the Python standard library.

    uv run --extra train examples/train.py
    uv run --extra train examples/train.py --tp 1 --steps 1000 --model.layers 8

It runs on all accelerators that JAX finds, or on a CPU split into eight virtual devices, as a mesh
of `dp` (each part of the batch) × `tp` (each part of the matrices).
"""

import io
import itertools
import math
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from xform.sharding import check_divisible, cpu_devices, make_mesh, settle, shardings
from xform.train.data import Rows, batch, decode, encode, pack


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and for how long."""

    model: llama.Config = llama.Config()
    steps: int = 300
    batch: int = 8
    """Rows in a batch, over all devices."""
    length: int = 512
    """Tokens in a row."""
    learning_rate: float = 4e-3
    """Its peak: it rises over a tenth of the steps, then falls along a cosine to a tenth."""
    weight_decay: float = 0.1
    seed: int = 0
    dp: int | None = None
    """Devices along the data axis; by default all that `tp` leaves."""
    tp: int | None = None
    """Devices along the tensor axis; by default 2 if the number of devices is even."""
    prompt: str = "import os\nimport sys\n\n\nclass "
    temperature: float = 0.5


# ---- data and devices ----------------------------------------------------------------------------


def standard_library() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the tokens of its modules in two parts: to train on, and every twentieth, held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [encode(path.read_bytes()) for path in paths]
    return [f for i, f in enumerate(files) if i % 20], files[::20]


def mesh_for(config: Config) -> Mesh:
    """Returns the mesh of all devices, once it is known that model and batch divide over it."""
    tp = config.tp or math.gcd(2, jax.device_count())
    mesh = make_mesh(dp=config.dp or jax.device_count() // tp, tp=tp)
    m = config.model
    split = {"heads": m.heads, "kv_heads": m.kv_heads, "hidden": m.hidden}
    check_divisible(mesh, dp={"batch": config.batch}, tp=split)
    return mesh


# ---- training ------------------------------------------------------------------------------------


def loss_and_grads(params: dict, rows: Rows, model: llama.Config) -> tuple[jax.Array, dict]:
    """Returns the mean loss per label over all devices, and its gradients; runs in `shard_map`."""
    # Seen as varying over dp, parameters get gradients of this device's rows alone, which we then
    # add up once. Otherwise each layer would wait for a sum of its own on the way back.
    local = jax.lax.pcast(params, "dp", to="varying")
    loss = jax.value_and_grad(partial(llama.loss, tp="tp"), has_aux=True)
    (total, labels), grads = jax.lax.psum(loss(local, rows, model), "dp")
    return total / labels, jax.tree.map(lambda g: g / labels, grads)


def optimizer_for(config: Config) -> optax.GradientTransformation:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0, peak, config.steps // 10, config.steps, peak / 10)
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def training(config: Config, mesh: Mesh, rows: Rows) -> Iterator[tuple[dict, float]]:
    """Yields the parameters and the loss after each step; the next step reuses their memory."""
    optimizer = optimizer_for(config)
    grads_of = jax.shard_map(
        partial(loss_and_grads, model=config.model),
        mesh=mesh,
        in_specs=(llama.SPECS, P("dp")),
        out_specs=(P(), llama.SPECS),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows):
        loss, grads = grads_of(params, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    init = partial(llama.init, config.model)
    params = jax.jit(init, out_shardings=shardings(mesh, llama.SPECS))(jax.random.key(config.seed))
    state = optimizer.init(params)
    for i in range(config.steps):
        rows_i = batch(rows, i, size=config.batch, seed=config.seed)
        rows_i = jax.device_put(rows_i, shardings(mesh, P("dp")))
        params, state, loss = settle(step(params, state, rows_i))
        yield params, float(loss)


def evaluate(config: Config, mesh: Mesh, params: dict, documents: list[np.ndarray]) -> float:
    """Returns the mean loss per label, in nats, over whole documents."""

    def sums(params, rows):
        return jax.lax.psum(llama.loss(params, rows, config.model, tp="tp"), "dp")

    in_specs = (llama.SPECS, P("dp"))
    sums = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=in_specs, out_specs=P()))
    rows = pack(documents, config.length, multiple=config.batch)
    total = labels = 0.0
    for i in range(0, len(rows.tokens), config.batch):
        part = Rows(*(x[i : i + config.batch] for x in rows))
        loss, count = settle(sums(params, jax.device_put(part, shardings(mesh, P("dp")))))
        total, labels = total + float(loss), labels + int(count)
    return total / labels


# ---- what one sees -------------------------------------------------------------------------------


def peak_flops(size: int = 2048) -> float:
    """Returns the FLOP/s of all devices, as a float32 matrix product on one of them measures it.

    Virtual CPU devices share their cores, so that one of them has the peak of all.
    """
    x = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
    return devices * 2 * size**3 / min(times)


def watched(config: Config, steps: Iterator[tuple[dict, float]], console: Console) -> dict:
    """Runs the steps under a progress bar and returns the last parameters."""
    peak = peak_flops()
    tokens = config.batch * config.length
    flops = llama.flops_per_token(config.model, config.length)
    text = "loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  MFU {task.fields[mfu]:.0%}"
    bar = Progress(TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn(text), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task("", total=config.steps, loss=math.nan, rate=math.nan, mfu=math.nan)
        params = {}
        start = None
        for i, (params, loss) in enumerate(steps):
            # The first step compiles, and is left out of the rate.
            start = start or time.perf_counter()
            rate = i * tokens / max(time.perf_counter() - start, 1e-9)
            bar.update(task, advance=1, loss=loss, rate=rate, mfu=rate * flops / peak)
            if (i + 1) % 50 == 0:
                bar.print(f"step {i + 1:4}  loss {loss:.3f}  {rate:,.0f} tokens/s  MFU {rate * flops / peak:.1%}")
    return params


def main(config: Config) -> None:
    console = Console()
    t0=time.time()
    mesh = mesh_for(config)
    documents, held_out = standard_library()
    rows = pack(documents, config.length)
    params = watched(config, training(config, mesh, rows), console)
    print("trained", time.time()-t0)
    print("validation", evaluate(config, mesh, params, held_out), time.time()-t0)
    local = jax.device_put(params, jax.devices()[0])
    for T in (.3,.5,.7):
      out = jax.jit(llama.generate, static_argnames=("length","config"))(local, encode(config.prompt), length=config.length, config=config.model, key=jax.random.key(0), temperature=T)
      print(decode(np.asarray(out)))
      print("sampled", time.time()-t0)
    import pickle; pickle.dump(jax.device_get(params), open("/tmp/params.pkl","wb"))

if __name__ == "__main__":
    cpu_devices(8)
    import tyro
    main(tyro.cli(Config))
