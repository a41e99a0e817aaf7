"""Trains the model of llama.py, by default on the source code of Python's standard library.

    uv run --extra train examples/train.py
    uv run --extra train examples/train.py --tp 1 --steps 1000 --model.layers 8
    uv run --extra train examples/train.py --dp 4 --tp 2 --layout.fsdp \
        --layout.sequence --layout.overlap ring
    uv run --extra train examples/train.py --dp 2 --cp 2 --tp 2 --length 2048 --layout.context ring
    uv run --extra train examples/train.py --data notes/ letters.txt
    uv run --extra train examples/train.py --data train.bin --separator 50256 \
        --model.codes 50257 --tokenizer tokenizer.json
    uv run --extra train examples/train.py --resume

It runs on all accelerators that JAX finds, or on a CPU split into eight virtual devices, as a mesh
of `dp` (each a part of the batch) × `cp` (of each row, if there is one) × `tp` (of the matrices);
how, parallel.py says. With `--processes`, as many as these share the mesh, each with its own
devices: all are given the same command but for their `--process`. What a run leaves is a folder in
`runs/`. Ctrl-C lets it finish and save its step; `--resume` goes on as if nothing had happened.
"""

import contextlib
import dataclasses
import io
import math
import sys
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import llama
import parallel
import several
from generate import generate
from parallel import Layout
from xform import Costs, all_finite, cost, explain, hfu, memory, mfu, numerics
from xform.sharding import cpu_devices, make_mesh, place, settle, shardings
from xform.train import files, run
from xform.train.checkpoint import Checkpoints
from xform.train.data import NO_LABEL, Rows, Source, batch
from xform.train.metrics import Metrics


@dataclasses.dataclass(frozen=True)
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
    precision: Literal["f32", "bf16", "f16", "fp8", "fp8_forward", "mxfp8", "mxfp4", "nvfp4"] = (
        "f32"
    )
    """What loss and gradients are computed in; parameters and their gradients are float32."""
    explain: str | None = None
    """A file to write what the compiled step runs to, by line: a page if it ends in `.html`."""
    seed: int = 0

    data: tuple[str, ...] = ()
    """Text files, folders of them, or one `.bin` file of tokens; by default, Python's library."""
    held_out: tuple[str, ...] = ()
    """What to validate on, in the same forms; by default, a twentieth of the data."""
    held_out_rows: int = 1024
    """How many rows of it are used, at most."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizer.json`; by default, the bytes of a text are its tokens."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Of a `.bin` file whose header does not say; by default, uint16."""
    separator: int | None = None
    """The token that ends a document of a `.bin` file; by default, the file is one document."""

    dp: int | None = None
    """Devices along the data axis; by default all that `cp` and `tp` leave."""
    cp: int | None = None
    """Devices along the context axis, which share each row; by default the mesh has none."""
    tp: int | None = None
    """Devices along the tensor axis; by default 2 where it divides devices and vocabulary."""
    layout: Layout = parallel.PLAIN
    coordinator: str | None = None
    """Where process 0 waits for the others, as `host:port`; `auto` where a cluster says so."""
    processes: int = 1
    """How many processes share the mesh."""
    process: int = 0
    """Which one of them this is."""

    run: str | None = None
    """The run's folder; by default a new one in `runs/`, named by date and time."""
    resume: bool = False
    """Go on with the run in `run`, by default the newest in `runs/`, with its config."""
    save_every: int = 100
    """Steps from one checkpoint to the next."""
    prompt: str = (
        "class Stack:\n    def push(self, item):\n        self.items.append(item)\n        self."
    )
    """The beginning of the texts that the trained model is asked for."""
    temperature: float = 0.3


# What may be another when a run goes on. Its data is known by the tokens, wherever they lie.
FREE = (
    *("dp", "cp", "tp", "layout", "coordinator", "processes", "process"),
    *("run", "resume", "save_every", "prompt", "temperature", "data"),
)


def check(config: Config) -> None:
    """Raises one error that lists all that makes no sense by itself."""
    m, layout = config.model, config.layout
    names = ("steps", "batch", "length", "held_out_rows", "save_every", "processes")
    names += ("dp", "cp", "tp")
    positive = {f"model.{name}": size for name, size in dataclasses.asdict(m).items()}
    positive |= {name: getattr(config, name) for name in names}
    wrong = [f"{x}={n} must be above 0" for x, n in positive.items() if n is not None and n <= 0]
    if m.kv_heads > 0 and m.heads % m.kv_heads:
        wrong.append(f"model.heads={m.heads} is no multiple of model.kv_heads={m.kv_heads}")
    if m.head_size % 2:
        wrong.append(f"model.head_size={m.head_size} must be even, since RoPE turns pairs")
    if layout.microbatches < 1 or not 0 <= layout.ahead <= m.layers:
        wrong.append(
            f"layout.microbatches={layout.microbatches} must be above 0, and "
            f"layout.ahead={layout.ahead} from 0 to model.layers={m.layers}"
        )
    if layout.overlap and not layout.sequence:
        wrong.append("layout.overlap hides what layout.sequence sends: set that too")
    if (layout.keep or layout.late) and not layout.fsdp:
        wrong.append("layout.keep and layout.late say how layout.fsdp gathers: set that too")
    if config.processes > 1 and (config.coordinator is None or config.run is None):
        wrong.append("processes have to find each other: name a coordinator, and a run")
    if not 0 <= config.process < max(1, config.processes):
        wrong.append(f"process={config.process} is none of processes={config.processes}, from 0")
    if config.processes > 1 and config.explain:
        wrong.append("explain is of one process")
    if config.temperature < 0:
        wrong.append(f"temperature={config.temperature} must not be negative")
    if config.separator is not None and not 0 <= config.separator < m.codes:
        wrong.append(f"separator={config.separator} is outside of model.codes={m.codes}")
    if not config.prompt:
        wrong.append("prompt is empty, and a text begins with a token")
    flat = [name.endswith(".bin") for name in (*(config.data or ("",)), *config.held_out)]
    if any(flat) and not all(flat):
        wrong.append("data and held_out mix text and `.bin` files")
    if not any(flat) and (config.separator, config.token_dtype) != (None, None):
        wrong.append("separator and token_dtype are of `.bin` files, and there is none")
    if wrong:
        raise ValueError(f"config: {'; '.join(wrong)}.")


# ---- data and devices ----------------------------------------------------------------------------


def tokenizer_for(config: Config) -> files.Tokenizer | None:
    """Returns the tokenizer of texts; None where the data are tokens, and nobody knows of what."""
    if config.tokenizer is None and any(name.endswith(".bin") for name in config.data):
        return None
    return files.load_tokenizer(config.tokenizer, config.model.codes)


def data_for(config: Config, tokenizer: files.Tokenizer | None) -> tuple[Source, Source]:
    """Returns the rows to train on, and those held out, once it is known that they are enough."""

    def read(names) -> list[np.ndarray]:
        codes, dtype = config.model.codes, config.token_dtype
        return files.read(list(map(Path, names)), tokenizer, codes=codes, dtype=dtype)

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    documents = read(config.data or library)
    parts = (documents, read(config.held_out)) if config.held_out else files.hold_out(documents)
    rows, held_out = (files.as_rows(part, config.length, config.separator) for part in parts)
    batch(rows, 0, size=config.batch, seed=config.seed)
    first = held_out.take(np.arange(min(len(held_out.tokens), config.held_out_rows)))
    if (first.labels == NO_LABEL).all():
        raise ValueError(
            "there is no token to predict in the data held out: give more (--held-out)"
        )
    return rows, held_out


def mesh_for(config: Config) -> Mesh:
    """Returns the mesh of all devices, once it is known that model and batch divide over it."""
    count = jax.device_count()
    tp = config.tp or math.gcd(2, count, config.model.codes)
    dp = config.dp or max(1, count // (tp * (config.cp or 1)))
    mesh = make_mesh(dp=dp, cp=config.cp, tp=tp)
    parallel.check(config.layout, config.model, mesh, config.batch, config.length)
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
    return parallel.gradients(config.model, mesh, config.layout, config.precision)


def optimizer_for(config: Config) -> optax.GradientTransformation:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    peak, steps = config.learning_rate, config.steps
    schedule = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps, peak / 10)
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def first_state(config: Config, mesh: Mesh) -> dict:
    """Returns fresh parameters and the optimiser's state of them, all on the mesh."""
    placed = parallel.placement(config.layout, config.model, mesh)
    init = jax.jit(llama.init, static_argnums=0, out_shardings=placed)
    params = init(config.model, jax.random.key(config.seed))
    state = optimizer_for(config).init(params)
    # Moments lie as their parameters do. What counts steps is a scalar on one device, so far.
    on_mesh = lambda x: x if x.ndim else place(x, shardings(mesh, P()))
    return {"params": params, "optimizer": jax.tree.map(on_mesh, state)}


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
    optimizer = optimizer_for(config)

    # A program of its own: as part of the one above, XLA's CPU code for it takes ten times longer.
    @partial(jax.jit, donate_argnums=(0,))
    def update(state, loss, grads):
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        # What is not finite changes nothing, so that there is still something to look at.
        good = all_finite((loss, grads))
        new = {"params": params, "optimizer": optimizer_state}
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)
        return kept, jnp.where(good, loss, jnp.nan)

    state = first_state(config, mesh) if saved is None else saved
    for i in range(done, config.steps):
        part = batch(rows, i, size=config.batch, seed=config.seed)
        part = parallel.place_rows(part, mesh)
        loss, grads = settle(grads_of(state["params"], part))
        state, loss = settle(update(state, loss, grads))
        if not math.isfinite(loss):
            found = numerics.find_nonfinite(gradients_for(config, mesh))(state["params"], part)
            raise FloatingPointError(f"step {i + 1} is not finite, and changed nothing:\n{found}")
        yield state, float(loss)


def evaluate(config: Config, mesh: Mesh, params: dict, rows: Source) -> float:
    """Returns the mean loss of all labels in the rows, in nats."""
    sums = parallel.sums(config.model, mesh, config.layout)
    total, labels, count = 0.0, 0, min(len(rows.tokens), config.held_out_rows)
    for i in range(0, count, config.batch):
        chosen = np.arange(i, i + config.batch)
        part = rows.take(chosen % count)
        part.labels[chosen >= count] = NO_LABEL
        loss, found = settle(sums(params, parallel.place_rows(part, mesh)))
        total, labels = total + float(loss), labels + int(found)
    return total / labels


# ---- a run ---------------------------------------------------------------------------------------

PANELS = {"loss": "loss (nats per token)", "tokens_per_second": "tokens per second"}


def forecast(config: Config, mesh: Mesh) -> Costs:
    """Prints what loss and gradients cost and need, before anything is compiled; returns costs."""
    struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.eval_shape(partial(llama.init, config.model), jax.random.key(0))
    params = jax.tree.map(struct, params, parallel.placement(config.layout, config.model, mesh))
    shape = (config.batch, config.length)
    rows = jax.eval_shape(lambda: Rows(*[np.zeros(shape, np.int32)] * 3))
    placed = shardings(mesh, P(*parallel.of_rows(mesh)))
    rows = jax.tree.map(lambda x: struct(x, placed), rows)
    grads = parallel.gradients(config.model, mesh, config.layout)
    costs = cost(grads)(params, rows)
    print(f"{costs}\n{memory(grads)(params, rows)}")
    return costs


def watched(
    config: Config, steps: Iterator[tuple[dict, float]], done: int, costs: Costs
) -> Iterator[tuple[int, dict, float, float | None]]:
    """Passes the steps on, with their numbers and tokens per second, beside a progress bar."""
    tokens = config.batch * config.length
    # Virtual CPU devices share their cores, so that one of them has the peak of all.
    devices = 1 if jax.default_backend() == "cpu" else None
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
                used = [f(costs, seconds, devices=devices) for f in (mfu, hfu)]
                shares = "  ".join(f"{share.name} {share:.0%}" for share in used)
                status = f"loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  {shares}"
                bar.update(task, completed=done + i + 1, description=status)
                if (done + i + 1) % 50 == 0:
                    bar.print(f"step {done + i + 1:4}  {status}")
            yield done + i + 1, state, loss, tokens / (now - last) if i else None
            last = time.perf_counter()


def restored(checkpoints: Checkpoints, state: dict, info: dict) -> dict:
    """Returns the newest checkpoint, once it is known to be of this config and this data."""
    saved = checkpoints.info()
    wrong = run.differences(saved["config"], info["config"], FREE)
    if saved["data"] != info["data"]:
        wrong.append(f"the data was {saved['data']} and is {info['data']} now")
    if wrong:
        raise ValueError(
            f"the checkpoint in `{checkpoints.folder}` is of another config: {'; '.join(wrong)}. "
            "Go on with the old one, or begin a new run."
        )
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


def fit(config: Config, mesh: Mesh, rows: Source, folder: Path, stop: run.Stop) -> tuple[dict, int]:
    """Trains until the last step, or until it is asked to stop; saves as it goes and at the end.

    Returns:
      The state and how many steps it has seen.
    """
    info = {"config": dataclasses.asdict(config), "data": files.fingerprint(rows)}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state, before = first_state(config, mesh), checkpoints.latest or 0
        if before:
            state = restored(checkpoints, state, info)
        costs = forecast(config, mesh)
        steps, done = training(config, mesh, rows, state, before), before
        watching = told_what_is_saved(checkpoints)
        with Metrics(several.own(folder), PANELS, done=before) as metrics, watching:
            for done, state, loss, rate in watched(config, steps, before, costs):
                metrics.write(done, loss=loss, tokens_per_second=rate)
                last = several.asked_to(stop)  # asked once: what it is asked for is saved
                if last or done == config.steps or done % config.save_every == 0:
                    checkpoints.save(done, state, info)
                if last:
                    break
    return state, done


# ---- what it has learned -------------------------------------------------------------------------


def sample(config: Config, tokenizer: files.Tokenizer, params: dict, rows: int = 16) -> list[str]:
    """Returns continuations of the prompt that fill a row, made on one device.

    Args:
      params: Those of the host.
    """
    prompt = tokenizer.encode(config.prompt.encode())
    tokens = generate(
        params,
        np.tile(prompt, (rows, 1)),
        config.model,
        tokens=max(1, config.length - len(prompt)),
        key=jax.random.key(config.seed),
        temperature=config.temperature,
    )
    return [tokenizer.decode(row) for row in np.asarray(tokens)]


def complaint(line: str) -> str | None:
    """Returns what Python's tokenizer says against the line, by itself; None if it passes."""
    try:
        list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        return str(error)
    return None


def show(config: Config, tokenizer: files.Tokenizer, params: dict) -> None:
    """Prints texts of the model; those of Python are judged by Python's own tokenizer."""
    texts = sample(config, tokenizer, params)
    print(config.prompt + "\n--------\n".join(texts))
    if config.data:
        return
    # The first line of a text completes the prompt's, and the last one is cut off.
    lines = [line for text in texts for line in text.splitlines()[1:-1] if line.strip()][:10]
    complaints = [complaint(line) for line in lines]
    # A line may open a docstring or a bracket for a later one to close: 6 % of the library's do.
    begun = sum("EOF in multi-line" in (words or "") for words in complaints)
    passed = f"\n{complaints.count(None)} of {len(lines)} lines pass `tokenize` by themselves"
    print(f"{passed}, {begun} more as the beginning of several")


def begin(config: Config) -> Path:
    """Returns the run's folder, which the first process makes."""
    folder = Path(config.run or ".")
    if not jax.process_index():
        folder = run.begin(config.run, dataclasses.asdict(config), resume=config.resume)
    several.wait()
    return folder


def main(config: Config) -> None:
    """Trains, evaluates and samples, or goes on with that."""
    check(config)
    mesh = mesh_for(config)
    tokenizer = tokenizer_for(config)
    rows, held_out = data_for(config, tokenizer)
    layout = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    platform = mesh.devices.flat[0].platform
    print(f"{rows.tokens.size:,} tokens in {len(rows.tokens):,} rows; {platform} devices: {layout}")

    folder = begin(config)
    print(f"the run is in {folder}")
    with run.stopping() as stop:
        state, done = fit(config, mesh, rows, folder, stop)
    if stop.signal:
        print(f"stopped after step {done}, which is saved; to go on: --run {folder} --resume")
        sys.exit(128 + stop.signal)

    params = jax.device_put(state["params"], shardings(mesh, P()))
    print(f"parameters: {sum(x.size for x in jax.tree.leaves(params)):,}")
    loss = evaluate(config, mesh, state["params"], held_out)
    unit = "byte" if tokenizer is files.BYTES else "token"
    print(f"validation loss: {loss:.3f} nats per {unit}, on data held out\n")
    if tokenizer and not jax.process_index():
        show(config, tokenizer, jax.device_get(params))


def from_command_line() -> Config:
    """Returns the config asked for; that of the run itself where one is resumed."""
    import tyro

    config = tyro.cli(Config)
    if not config.resume:
        return config
    # Names that train.py no longer has are left to the comparison with the checkpoint.
    known = lambda kind, saved: {
        f.name: saved[f.name] for f in dataclasses.fields(kind) if f.name in saved
    }
    folder = config.run or str(run.newest_run())
    saved = run.read_run(folder)["config"]
    parts = known(Config, saved) | {"run": folder, "resume": True}
    parts["model"] = llama.Config(**known(llama.Config, saved["model"]))
    parts["layout"] = Layout(**known(Layout, saved.get("layout", {})))
    parts |= {name: tuple(saved[name]) for name in ("data", "held_out")}
    return tyro.cli(Config, default=Config(**parts))


def run_from_command_line() -> None:
    """Does what the command line asks for, with the devices of this process."""
    config = from_command_line()
    check(config)
    cpu_devices(max(1, 8 // config.processes))
    several.join(config.coordinator, config.processes, config.process)
    main(config)


if __name__ == "__main__":
    run_from_command_line()
