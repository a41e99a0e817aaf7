"""What numbers do to speed: a product and attention on one GPU, on data of seven kinds.

    python3 benchmarks/data_power.py                # a table, in about a minute
    python3 benchmarks/data_power.py --seconds 4    # each for longer

A transistor that does not flip takes no power, and a GPU at its limit of power lowers its clock: so
the same program, on the same shapes, is faster on zeros than on random numbers (H. He, "Strangely,
matrix multiplications on GPUs run faster when given predictable data!", 2024). Benchmarks therefore
take random numbers; this one shows by how much others mislead.

Each program runs on each kind without a pause, in two rounds, there and back again. Clock and power
are what `nvidia-smi` says meanwhile, but for the first part of a run, in which both still change.
TFLOP/s by GHz is the speed at a fixed clock: where it is level, the clock explains everything.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from xform import flex_attention  # noqa: E402

SIZE = 8192
B, T, H, D = 4, 4096, 16, 128
ROUNDS, SECONDS, SETTLING = 2, 1.5, 0.5
FLIGHT = 20  # calls between two waits
QUERY = "clocks.sm,power.draw.instant,temperature.gpu"


def checkerboard(shape) -> jax.Array:
    """Ones and zeros by turns, along rows and columns."""
    row, col = (
        jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (len(shape) - 2, -1 % len(shape))
    )
    return ((row + col) % 2).astype(jnp.bfloat16)


def sparse(key, shape) -> jax.Array:
    """Normal numbers, three of four replaced by zero."""
    keep, value = jax.random.split(key)
    return jnp.where(
        jax.random.bernoulli(keep, 0.25, shape), jax.random.normal(value, shape, jnp.bfloat16), 0
    )


DATA: dict[str, Callable] = {
    "zeros": lambda key, shape: jnp.zeros(shape, jnp.bfloat16),
    "normal": lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16),
    "uniform": lambda key, shape: jax.random.uniform(key, shape, jnp.bfloat16),
    "checkerboard": lambda key, shape: checkerboard(shape),
    "ternary": lambda key, shape: jax.random.randint(key, shape, -1, 2).astype(jnp.bfloat16),
    "sparse": sparse,
    "NaN": lambda key, shape: jnp.full(shape, jnp.nan, jnp.bfloat16),
}
PROGRAMS = {
    f"product of {SIZE:,}³": (jnp.matmul, [(SIZE, SIZE)] * 2, 2 * SIZE**3),
    f"attention, {T:,} tokens, heads of {D}": (
        partial(flex_attention, implementation="mosaic_gpu"),
        [(B, T, H, D)] * 3,
        4 * B * T * T * H * D,
    ),
}  # fmt: skip
"""By name: a function, the shapes of its arguments, its FLOPs."""


# ---- what the GPU says of itself -----------------------------------------------------------------


@contextmanager
def watched() -> Iterator[list[tuple[float, list[float]]]]:
    """Yields a list that grows by `(time, [MHz, W, °C])`, all the while; empty if nobody tells."""
    samples: list[tuple[float, list[float]]] = []
    if not shutil.which("nvidia-smi"):
        yield samples
        return
    command = [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={QUERY}",
        "--format=csv,noheader,nounits",
        "--loop-ms=50",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def listen():
        assert process.stdout is not None
        for line in process.stdout:
            fields = line.split(",")
            if len(fields) == len(QUERY.split(",")):  # and not a complaint
                samples.append((time.perf_counter(), [number(x) for x in fields]))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait()
        listener.join()


def number(text: str) -> float:
    """What a field says; NaN for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def between(samples, start: float, end: float) -> list[float]:
    """The mean of each field of the samples of a time; NaN where there are none."""
    within = [values for at, values in samples if start <= at <= end]
    return [mean(field) for field in zip(*within, strict=True)] or [float("nan")] * 3


# ---- the run -------------------------------------------------------------------------------------


def keep_busy(call: Callable, seconds: float) -> tuple[int, float, float]:
    """Calls without a pause; returns how often, when that began, and when it ended."""
    jax.block_until_ready(call())
    start, count, last = time.perf_counter(), 0, call()
    while time.perf_counter() - start < seconds:
        previous = last
        for _ in range(FLIGHT):
            last = call()
        count += FLIGHT
        jax.block_until_ready(previous)
    jax.block_until_ready(last)
    return count + 1, start, time.perf_counter()


def measure(program: Callable, shapes, flops: float, seconds: float, samples) -> dict[str, list]:
    """`[TFLOP/s, MHz, W, °C]` of a program on every kind of data."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = {
        n: [make(k, s) for k, s in zip(keys, shapes, strict=True)] for n, make in DATA.items()
    }
    compiled = jax.jit(program).lower(*inputs["normal"]).compile()
    runs: dict[str, list[list[float]]] = {name: [] for name in DATA}
    for n in range(ROUNDS):
        for name in list(DATA)[:: -1 if n % 2 else 1]:
            count, start, end = keep_busy(partial(compiled, *inputs[name]), seconds)
            settled = start + min(SETTLING, seconds / 2)
            rate = flops * count / (end - start) / 1e12
            runs[name].append([rate, *between(samples, settled, end)])
    return {name: [mean(x) for x in zip(*rows, strict=True)] for name, rows in runs.items()}


def table(title: str, rows: dict[str, list]) -> None:
    text = lambda x, digits=0: "–" if x != x else f"{x:,.{digits}f}"
    base = rows["normal"][0]
    print(f"\n| {title} | TFLOP/s | of normal | MHz | W | °C | TFLOP/s by GHz |")
    print("|" + "---|" * 7)
    for name, (rate, clock, power, heat) in rows.items():
        values = text(rate), f"{rate / base:.2f}", text(clock), text(power), text(heat)
        print(f"| {name} | {' | '.join(values)} | {text(1e3 * rate / clock)} |", flush=True)


def heading() -> str:
    name = jax.devices()[0].device_kind
    limit = "unknown"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--id=0", "--query-gpu=power.limit", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        limit = said.stdout.strip() if said.returncode == 0 else limit
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"$ python3 benchmarks/data_power.py\n{name}, power limit {limit}; "
        f"Python {platform.python_version()}, jax {jax.__version__}, commit {commit or 'unknown'}; "
        "bfloat16"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one run")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"This measures a GPU; JAX found {jax.default_backend()} alone.")
    begin = time.perf_counter()
    print(heading(), flush=True)
    with watched() as samples:
        for title, (program, shapes, flops) in PROGRAMS.items():
            table(title, measure(program, shapes, flops, options.seconds, samples))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
