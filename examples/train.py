"""Trains the model of llama.py on the source code of the Python standard library.

    uv run --extra train examples/train.py
    uv run --extra train examples/train.py --tp 1 --steps 1000 --model.layers 8

It runs on all accelerators that JAX finds, or on a CPU split into eight virtual devices, as a mesh
of `dp` (each a part of the batch) × `tp` (each a part of the matrices).
"""

import io
import math
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import llama
from xform import Costs, cost, explain, hfu, memory, mfu
from xform.sharding import check_divisible, cpu_devices, make_mesh, settle, shardings
from xform.train import Rows, batch, decode, encode, pack


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and for how long."""

    model: llama.Config = llama.Config()
    steps: int = 500
    batch: int = 8
    """Rows in a batch, over all devices."""
    length: int = 256
    """Tokens in a row."""
    learning_rate: float = 3e-3
    """Its peak: it rises over a tenth of the steps, then falls along a cosine to a tenth."""
    weight_decay: float = 0.1
    explain: str | None = None
    """A file to write what the compiled step runs to, by line: a page if it ends in `.html`."""
    seed: int = 0
    dp: int | None = None
    """Devices along the data axis; by default all that `tp` leaves."""
    tp: int | None = None
    """Devices along the tensor axis; by default 2 where their number is even."""
    prompt: str = "import os\nimport sys\n\n\nclass Stack:\n    def "
    temperature: float = 0.5


# ---- data and devices ----------------------------------------------------------------------------


def standard_library() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the tokens of its modules: those to train on, and every twentieth, held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [encode(path.read_bytes()) for path in paths]
    return [file for i, file in enumerate(files) if i % 20], files[::20]


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
    """Returns the mean loss of all labels and its gradients; runs on each device in `shard_map`."""
    # Marked as varying over dp, the parameters get the gradients of this device's rows alone, which
    # are added up once, here. Else each layer would wait for its own sum on the way back.
    local = jax.lax.pcast(params, "dp", to="varying")
    sum_and_grads = jax.value_and_grad(partial(llama.loss, tp="tp"), has_aux=True)
    (total, labels), grads = jax.lax.psum(sum_and_grads(local, rows, model), "dp")
    return total / labels, jax.tree.map(lambda g: g / labels, grads)


def explained(f: Callable, file: str) -> Callable:
    """Returns `f`, which at its first call writes to a file what its compiled program runs."""

    def call(*args):
        if not Path(file).exists():
            explain(f)(*args).save(file)
        return f(*args)

    return call


def gradients(config: Config, mesh: Mesh) -> Callable:
    """Returns the loss and the gradients of parameters and rows, over the mesh."""
    specs, body = llama.SPECS, partial(loss_and_grads, model=config.model)
    body = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    return jax.jit(body)


def optimizer_for(config: Config) -> optax.GradientTransformation:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    peak, steps = config.learning_rate, config.steps
    schedule = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps, peak / 10)
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def training(config: Config, mesh: Mesh, rows: Rows) -> Iterator[tuple[dict, float]]:
    """Yields the parameters and the loss of each step; the next step reuses their memory."""
    init = jax.jit(llama.init, static_argnums=0, out_shardings=shardings(mesh, llama.SPECS))
    grads_of = gradients(config, mesh)
    if config.explain:
        Path(config.explain).unlink(missing_ok=True)
        grads_of = explained(grads_of, config.explain)
    optimizer = optimizer_for(config)

    # A program of its own: as part of the one above, XLA's CPU code for it takes ten times longer.
    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = init(config.model, jax.random.key(config.seed))
    state = optimizer.init(params)
    for i in range(config.steps):
        part = batch(rows, i, size=config.batch, seed=config.seed)
        part = jax.device_put(part, shardings(mesh, P("dp")))
        loss, grads = settle(grads_of(params, part))
        params, state = settle(update(params, state, grads))
        yield params, float(loss)


def evaluate(config: Config, mesh: Mesh, params: dict, documents: list[np.ndarray]) -> float:
    """Returns the mean loss of all labels in the documents, in nats."""

    def sums(params, rows):
        return jax.lax.psum(llama.loss(params, rows, config.model, tp="tp"), "dp")

    specs = (llama.SPECS, P("dp"))
    sums = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=P()))
    rows = pack(documents, config.length, multiple=config.batch)
    total = labels = 0.0
    for i in range(0, len(rows.tokens), config.batch):
        part = Rows(*(x[i : i + config.batch] for x in rows))
        loss, count = settle(sums(params, jax.device_put(part, shardings(mesh, P("dp")))))
        total, labels = total + float(loss), labels + int(count)
    return total / labels


# ---- what one sees -------------------------------------------------------------------------------


def forecast(config: Config, mesh: Mesh) -> Costs:
    """Prints what loss and gradients cost and need, before anything is compiled; returns costs."""
    params = jax.eval_shape(partial(llama.init, config.model), jax.random.key(0))
    shape = (config.batch, config.length)
    rows = jax.eval_shape(lambda: Rows(*[np.zeros(shape, np.int32)] * 3))
    costs = cost(gradients(config, mesh))(params, rows)
    print(f"{costs}\n{memory(gradients(config, mesh))(params, rows)}")
    return costs


def watched(config: Config, steps: Iterator[tuple[dict, float]], costs: Costs) -> dict:
    """Runs the steps beside a progress bar, and returns the last parameters."""
    tokens = config.batch * config.length
    # Virtual CPU devices share their cores, so that one of them has the peak of all.
    devices = 1 if jax.default_backend() == "cpu" else None
    columns = ("step {task.completed}/{task.total}", BarColumn(), "{task.description}")
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=config.steps)
        params, _ = next(steps)
        start = time.perf_counter()
        for i, (params, loss) in enumerate(steps, start=1):  # noqa: B007  (the last are returned)
            seconds = (time.perf_counter() - start) / i
            used = [f(costs, seconds, devices=devices) for f in (mfu, hfu)]
            shares = "  ".join(f"{share.name} {share:.0%}" for share in used)
            status = f"loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  {shares}"
            bar.update(task, completed=i + 1, description=status)
            if (i + 1) % 50 == 0:
                bar.print(f"step {i + 1:4}  {status}")
    return params


def sample(config: Config, params: dict, rows: int = 6) -> list[str]:
    """Returns a few continuations of the prompt, made on one device."""
    prompt = encode(config.prompt)
    generate = jax.jit(llama.generate, static_argnames=("config", "rows", "length"))
    tokens = generate(
        jax.device_get(params),
        prompt,
        config.model,
        rows=rows,
        length=config.length,
        key=jax.random.key(config.seed),
        temperature=config.temperature,
    )
    return [decode(row[len(prompt) :]) for row in np.asarray(tokens)]


def complaint(line: str) -> str | None:
    """Returns what Python's tokenizer says against the line, by itself; None if it passes."""
    try:
        list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        return str(error)
    return None


def main(config: Config) -> None:
    """Trains, evaluates and samples."""
    mesh = mesh_for(config)
    documents, held_out = standard_library()
    rows = pack(documents, config.length)
    layout = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    print(
        f"{rows.tokens.size:,} bytes of Python; {mesh.devices.flat[0].platform} devices: {layout}"
    )

    costs = forecast(config, mesh)
    params = watched(config, training(config, mesh, rows), costs)
    print(f"parameters: {sum(x.size for x in jax.tree.leaves(params)):,}")
    loss = evaluate(config, mesh, params, held_out)
    print(f"validation loss: {loss:.3f} nats per byte, on {len(held_out)} files held out\n")

    texts = sample(config, params)
    print(config.prompt + "\n--------\n".join(texts))
    # The first line of a text completes the prompt's, and the last one is cut off.
    lines = [line for text in texts for line in text.splitlines()[1:-1] if line.strip()][:10]
    complaints = [complaint(line) for line in lines]
    # A line may open a docstring or a bracket for a later one to close: 6 % of the library's do.
    begun = sum("EOF in multi-line" in (words or "") for words in complaints)
    print(
        f"\n{complaints.count(None)} of {len(lines)} lines pass `tokenize` by themselves,", end=" "
    )
    print(f"{begun} more as the beginning of several")


if __name__ == "__main__":
    import tyro

    cpu_devices(8)
    main(tyro.cli(Config))
