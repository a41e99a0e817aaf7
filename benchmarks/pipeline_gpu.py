"""Pipeline schedules on two GPUs: what a step takes, beside what the simulator said it would.

    python3 benchmarks/pipeline_gpu.py
    python3 benchmarks/pipeline_gpu.py --tokens 2048 --seconds 600
    python3 benchmarks/scaling_gpu.py --only schedules   # on as many GPUs as there are
    python3 benchmarks/pipeline_gpu.py --tiny        # on two virtual CPU devices: does it run?

Sixteen layers of the shape of a model with a billion parameters (width 2,048, hidden 8,192) in
bfloat16, eight or four to a stage; what travels is `tokens` of them. Attention itself is left out,
its four products are not. Gradients are added up in float32.

An executor's own `measure` finds what each pass takes; `simulate` makes a step of that, and the
step is then timed. `bound` is what the busiest rank would take if it never waited. Of a row that
fails, the reason is printed, and the next one runs; what `--seconds` leave no time for is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xform.sharding import cpu_devices, make_mesh, settle, shardings  # noqa: E402
from xform.sharding.pipeline import (  # noqa: E402
    Schedule,
    Times,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    one_program,
    per_stage,
    simulate,
    zb_h1,
    zb_v,
)

RANKS, STEPS = 2, 3
PEAK = 989e12  # FLOP/s of an H200 in bfloat16, dense, by its data sheet
BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "1f1b, ahead 2": partial(one_f_one_b, ahead=2),
    "zb-v": zb_v,
    "interleaved": interleaved,
    "gpipe": gpipe,
    "dualpipe-v": dualpipe_v,
}
EXECUTORS: dict[str, Callable] = {"per_stage": per_stage, "one_program": one_program}


@dataclasses.dataclass(frozen=True)
class Size:
    """What runs: all layers, the width of the stream and of a layer's inside, tokens at a time."""

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    tokens: int = 4096
    microbatches: tuple[int, ...] = (8, 32)

    @property
    def flops(self) -> int:
        """Of a microbatch, forward and backward."""
        products = 4 * self.width**2 + 3 * self.width * self.hidden
        return 6 * self.layers * products * self.tokens


TINY = Size(layers=4, width=16, hidden=32, tokens=8, microbatches=(3, 6))


# ---- the model -----------------------------------------------------------------------------------


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def layer(x, w):
    h = norm(x)
    mixed = (h @ w["q"]) * jax.nn.silu(h @ w["k"]) + h @ w["v"]
    x = x + mixed @ w["o"]
    h = norm(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def stage(w, x, batch):
    del batch
    return lax.scan(layer, x, w)[0]


def first(gain, batch):
    return batch * gain


def last(gain, y, batch):
    return jnp.mean(jnp.square(y - gain * batch).astype(jnp.float32))


def operands(size: Size, mesh, stages: int, microbatches: int) -> tuple:
    """Random weights [stages, layers of a stage, …], made where they belong; gain; microbatches."""
    n, D, F = size.layers // stages, size.width, size.hidden
    shapes = {
        **dict.fromkeys("qkvo", (D, D)),
        "gate": (D, F), "up": (D, F), "down": (F, D),
    }  # fmt: skip

    def make(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
        gain = lambda shape: jnp.bfloat16((shape[0] * size.layers) ** -0.5)
        weights = {
            name: draw(keys[name], stages, n, *shape) * gain(shape)
            for name, shape in shapes.items()
        }
        batch = draw(jax.random.fold_in(key, 1), microbatches, size.tokens, D)
        return weights, jnp.bfloat16(1), batch

    at = shardings(mesh, ({name: P("pp") for name in shapes}, P(), P()))
    return jax.block_until_ready(jax.jit(make, out_shardings=at)(jax.random.key(0)))


# ---- what passes take, and steps -----------------------------------------------------------------


class Bench:
    """What is measured once for many rows.

    Attributes:
      size: what runs.
      mesh: the ranks.
      found: for executor, schedule and microbatches: what a step took, and its bound.
    """

    def __init__(self, size: Size, mesh):
        self.size, self.mesh = size, mesh
        self.found: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._given = cache(partial(operands, size, mesh))
        self._times: dict[tuple[str, int], Times] = {}
        self._runs = {name: make(stage, first, last, mesh=mesh) for name, make in EXECUTORS.items()}

    def times(self, executor: str, schedule: Schedule) -> Times:
        """What passes of so many stages take; all stages are alike."""
        key = executor, schedule.stages
        if key not in self._times:
            # A run of `per_stage` is compiled for a number of microbatches: here, that of its row.
            some = schedule if executor == "per_stage" else _two(schedule)
            given = self._given(some.stages, some.microbatches)
            self._times[key] = found = self._runs[executor].measure(some, *given)
            print(_costs(executor, schedule, found), flush=True)
        return self._times[key]

    def row(self, executor: str, name: str, microbatches: int) -> str:
        """A line of the table."""
        schedule = BUILDERS[name](self.mesh.size, microbatches)
        times, run = self.times(executor, schedule), self._runs[executor]
        expected = simulate(schedule, times, lockstep=executor == "one_program")
        if executor == "one_program":  # whose ticks are filled by them
            run.times = times
        step = partial(run, schedule, *self._given(schedule.stages, microbatches))
        for _ in range(2):
            jax.block_until_ready(settle(step()))
        taken = median(_seconds(step) for _ in range(STEPS))
        bound = max(expected.busy)
        self.found[executor, name, microbatches] = taken, bound
        used = self.size.flops * microbatches / (taken * self.mesh.size * PEAK)
        return (
            f"{executor:12}{name:15}{microbatches:4}{1e3 * taken:10.1f}{1e3 * expected.end:11.1f}"
            f"{taken / expected.end:7.3f}{1e3 * bound:10.1f}{taken / bound:7.3f}"
            f"{1 - bound / taken:9.1%}{expected.bubble:9.1%}{used:7.1%}"
        )

    def summary(self, microbatches: int) -> str:
        """The best row, and whether zero bubble pays."""
        rows = {key[:2]: value for key, value in self.found.items() if key[2] == microbatches}
        if not rows:
            return ""
        best = min(rows, key=lambda key: rows[key][0])
        bound = min(bound for _, bound in rows.values())
        lines = [
            f"{microbatches} microbatches: best is {best[1]}, {best[0]}, at "
            f"{rows[best][0] / bound:.3f} of the least time without a bubble"
        ]
        for executor in EXECUTORS:
            of = {name: taken for (by, name), (taken, _) in rows.items() if by == executor}
            zero = [name for name in of if name.startswith("zb")]
            whole = [name for name in of if not name.startswith("zb")]
            if zero and whole:
                a, b = (min(names, key=lambda name: of[name]) for names in (zero, whole))
                pays = "pays" if of[a] < of[b] else "does not pay"
                lines.append(f"  {executor}: zero bubble {pays}: {a} / {b} = {of[a] / of[b]:.3f}")
        return "\n".join(lines)


def _two(schedule: Schedule) -> Schedule:
    """Its first two microbatches."""
    rows = [
        [[a for a in cell if a.microbatch < 2] for cell in row]
        for row in schedule.without_messages().rows
    ]
    return Schedule(rows, schedule.name)


def _seconds(step: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def _costs(executor: str, schedule: Schedule, times: Times) -> str:
    """The costs in words, in ms."""

    def show(value) -> str:
        values = value if isinstance(value, tuple) else (value,)
        return " ".join(f"{1e3 * v:.3f}" for v in values)

    passes = ", ".join(f"{kind} {show(getattr(times, kind))}" for kind in "FBIW")
    return f"# {executor}, stages on ranks {schedule.rank_of}: {passes}, message {show(times.send)}"


# ---- the table -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=Size.tokens)
    parser.add_argument("--seconds", type=float, default=225)
    parser.add_argument("--only", nargs="*", default=[*BUILDERS], choices=[*BUILDERS])
    given = parser.parse_args()
    start, size = time.perf_counter(), dataclasses.replace(Size(), tokens=given.tokens)
    if given.tiny:
        jax.config.update("jax_platforms", "cpu")
        cpu_devices(RANKS)
        size = TINY
    elif jax.default_backend() != "gpu" or jax.device_count() < RANKS:
        sys.exit(f"This measures {RANKS} GPUs; JAX found {jax.devices()}. Try --tiny.")
    with tempfile.TemporaryDirectory() as cache:
        # Both ranks run the same programs: the second finds those of the first.
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        bench = Bench(size, make_mesh(pp=RANKS, devices=jax.devices()[:RANKS]))
        table(bench, given.only, lambda: given.seconds - (time.perf_counter() - start))
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def table(bench: Bench, names: Sequence[str], time_left: Callable[[], float]) -> None:
    """Prints the rows of these schedules; after the time that is left, none begins."""
    ranks, device = bench.mesh.size, bench.mesh.devices.flat[0].device_kind
    print(f"jax {jax.__version__}, {ranks} × {device}; {bench.size}; times in ms")
    print(
        f"{'executor':12}{'schedule':15}{'M':>4}{'measured':>10}{'simulated':>11}{'ratio':>7}"
        f"{'bound':>10}{'ratio':>7}{'bubble':>9}{'(sim.)':>9}{'MFU':>7}"
    )
    left = []
    for name, executor, microbatches in product(names, EXECUTORS, bench.size.microbatches):
        if time_left() < 0:
            left.append(f"{executor} {name} {microbatches}")
            continue
        try:
            print(bench.row(executor, name, microbatches), flush=True)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            print(f"{executor:12}{name:15}{microbatches:4}  {why}", flush=True)
    if left:
        print(f"no time left for: {', '.join(left)}")
    print()
    for microbatches in bench.size.microbatches:
        print(bench.summary(microbatches))


if __name__ == "__main__":
    main()
