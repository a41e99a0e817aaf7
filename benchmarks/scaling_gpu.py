"""Training on the 1, 2, 4 or 8 GPUs of a host: dp, FSDP, tp, cp, pp, and products of these.

    python3 benchmarks/scaling_gpu.py                        # all that these GPUs can run
    python3 benchmarks/scaling_gpu.py --only train --rows "8B bf16 fsdp"
    python3 benchmarks/scaling_gpu.py --compile-only 8       # for 8 H200s, on a host without one
    python3 benchmarks/scaling_gpu.py                        # without a GPU: parity on 8 CPUs

`train`: steps of examples/train.py, as layouts.py takes them, with 1.1 and 8.0 billion parameters,
rows of 8,192 tokens, in bfloat16 and in 8 bits. Each number of GPUs has its rows, and all that is
predicted is printed before anything is measured. MFU counts the model's operations at the bfloat16
peak, in 8 bits too. A layout that needs more memory than there is, as the planner has it, is left
out with a line that says so. All layouts of a model see the same tokens, so that their losses are
those of its first row: `loss` before any update, `later` after the last. `--compile-only` asks XLA
what the same programs take, and runs none.

`parity`: loss and gradients of a small model in every layout, in float64, beside one device's.
`schedules`: pipeline_gpu.py's table, over all GPUs: pipelines beside the simulator.
`context`: context_gpu.py's row of 131,072 tokens over all GPUs, beside one.

Without a GPU it is parity alone on eight virtual devices of the CPU; with `--tiny`, small sizes of
all that is asked for. What `--seconds` leave no time for is named. Of a row that fails the reason
is printed, and the next one runs; the command then ends with code 1, as it does without parity.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a fault in NVLink multicast takes the host along

import jax  # noqa: E402
import numpy as np  # noqa: E402

import llama  # noqa: E402
import parallel  # noqa: E402
import pipelined  # noqa: E402
from benchmarks import context_gpu, pipeline_gpu  # noqa: E402
from benchmarks.layouts import (  # noqa: E402
    BILLION,
    Measured,
    Row,
    bytes_of,
    heading,
    measured,
    predicted,
)
from xform import memory  # noqa: E402
from xform.sharding import cpu_devices, make_mesh, plan, settle  # noqa: E402
from xform.train.data import Rows  # noqa: E402

PARTS = ("parity", "train", "schedules", "context")
PEAK = plan.machine("H200", 1).peak()
GIB = 2**30
WORST = 1e-9
"""In float64, another order of summation is worth 1e-13, and the smallest fault a half."""

LLAMA_8B = llama.Config(
    codes=128_256, layers=32, width=4096, heads=32, kv_heads=8, head_size=128, hidden=14_336,
    rope_base=500_000.0,
)  # fmt: skip
MODELS = {"1B": BILLION, "8B-half": replace(LLAMA_8B, layers=16), "8B": LLAMA_8B}
SMALL = llama.Config(
    codes=256, layers=8, width=64, heads=8, kv_heads=8, head_size=8, hidden=128, fuse=False
)
"""Not fused, since kernels have no float64."""
POLICIES = ("bf16", "fp8")

TARGETS = (
    ("8B bf16 under FSDP, tokens/s/GPU", 9_500, "8B bf16 fsdp=8"),
    ("8B fp8 under FSDP, tokens/s/GPU", 13_500, "8B fp8 fsdp=8"),
    ("1B bf16, a GPU of 8 / one alone", 0.92, "1B bf16 fsdp=8", "1B bf16 fsdp=1"),
    ("8B-half bf16, a GPU of 8 / one alone", 0.92, "8B-half bf16 fsdp=8", "8B-half bf16 fsdp=1"),
    ("8B bf16 tp=4, a ring / plain", 1.08, "8B bf16 tp=4 ring", "8B bf16 tp=4"),
    ("the same on 8 GPUs", 1.08, "8B bf16 fsdp=2 tp=4 ring", "8B bf16 fsdp=2 tp=4"),
)
"""What it is for, at least how much, of which row, relative to which other."""

# ---- layouts -------------------------------------------------------------------------------------

ALONE = ("dp={}", "fsdp={}", "tp={}", "tp={} ring", "cp={}", "pp={}", "pp={} one-program")
LAYOUTS = {
    1: ("dp=1", "fsdp=1"),
    2: tuple(name.format(2) for name in ALONE),
    4: (
        *(name.format(4) for name in ALONE),
        "fsdp=2 tp=2", "fsdp=2 cp=2", "fsdp=2 pp=2", "cp=2 tp=2", "pp=2 tp=2", "pp=2 cp=2",
    ),
    8: (
        *(name.format(8) for name in ALONE),
        "fsdp=4 tp=2", "fsdp=2 tp=4", "fsdp=2 tp=4 ring", "fsdp=4 cp=2", "fsdp=4 pp=2",
        "cp=2 tp=4", "pp=4 tp=2", "pp=4 cp=2",
        "fsdp=2 cp=2 tp=2", "fsdp=2 pp=2 tp=2", "fsdp=2 pp=2 cp=2", "pp=2 cp=2 tp=2",
    ),
}  # fmt: skip
"""By the number of devices. `fsdp` is `dp` with parameters split, and layers computed once more."""


def row_of(name: str) -> Row:
    """The layout that a name says, such as "fsdp=2 tp=4 ring".

    A replica has four rows under FSDP, else two; in a pipeline, one for each microbatch, of which
    there are four for each rank.
    """
    words = name.split()
    sizes = {axis: int(n) for axis, _, n in (word.partition("=") for word in words) if n}
    fsdp, tp, pp = "fsdp" in sizes, sizes.get("tp", 1), sizes.get("pp")
    dp = sizes.pop("fsdp", sizes.get("dp", 1))
    ring = "ring" if "ring" in words else None
    layout = parallel.Layout(fsdp=fsdp, sequence=tp > 1, overlap=ring)
    microbatches = 4 * pp if pp else None
    executor = "one_program" if "one-program" in words else "per_stage"
    rows = dp * (microbatches or (4 if fsdp else 2))
    return Row(name, {**sizes, "dp": dp, "tp": tp}, layout, rows, microbatches, executor)


@dataclass(frozen=True)
class Case:
    """A row of `train`.

    Attributes:
      name: the model, the policy and the layout.
      model: its sizes.
      length: tokens of a row.
      policy: of `xform.precision`.
      row: the layout.
    """

    name: str
    model: llama.Config
    length: int
    policy: str
    row: Row

    @property
    def plan(self) -> plan.Plan:
        """What the planner says, in bfloat16."""
        return predicted(self.row, self.model, self.length)

    @property
    def tokens(self) -> float:
        """Of a step, for each device."""
        return self.row.rows * self.length / self.row.devices

    def mfu(self, seconds: float) -> float:
        return llama.flops_per_token(self.model, self.length) * self.tokens / seconds / PEAK

    def shapes(self) -> tuple[Callable, dict, Rows]:
        """Loss and gradients, and the shapes and placement of parameters and rows."""
        mesh, row = self.row.mesh(), self.row
        size = row.rows, self.length
        given = pipelined.shapes(row.layout, self.model, mesh, row.schedule, size)
        return row.gradients(self.model, mesh, self.policy), *given


def usable() -> int:
    """How many devices of those there are."""
    return max(n for n in LAYOUTS if n <= jax.device_count())


def cases(given: argparse.Namespace) -> list[Case]:
    """All rows for the devices here that are asked for, those with a target first.

    Fewer devices run what scaling is counted from. The half model, which one GPU can hold, is there
    for that alone.
    """
    models, length = ({"small": SMALL}, 128) if given.tiny else (MODELS, 8192)
    if given.compile_only:  # as on a GPU that is there
        models = {name: replace(model, fuse=True) for name, model in models.items()}
    less = [f"fsdp={n}" for n in LAYOUTS if n < usable()]
    found = [
        Case(f"{name} {policy} {layout}", model, length, policy, row_of(layout))
        for policy in POLICIES
        for name, model in models.items()
        for layout in (*LAYOUTS[usable()], *less)
        if name != "8B-half" or layout in (f"fsdp={usable()}", *less)
    ]
    wanted = {name for target in TARGETS for name in target[2:]}
    found = [case for case in found if given.asks_for(case.name)]
    return sorted(found, key=lambda case: case.name not in wanted)


# ---- a run of the command ------------------------------------------------------------------------


class Run:
    """What was found so far, and how much time there is.

    Attributes:
      found: by part, a result for each row.
    """

    def __init__(self, seconds: float, file: Path | None = None):
        self.found: dict[str, list[dict]] = {}
        self._seconds, self._file, self._start = seconds, file, time.perf_counter()

    @property
    def taken(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start

    def time_left(self) -> float:
        return self._seconds - self.taken

    def each[T: (Case, Row)](self, part: str, rows: list[T], measure: Callable[[T], dict]) -> None:
        """Keeps what is measured of rows for which there is time; names the others.

        A row that fails is a finding, not the end of the table.
        """
        left = []
        for row in rows:
            if self.time_left() < 0:
                left.append(row.name)
                continue
            try:
                self.keep(part, name=row.name, **measure(row))
            except Exception as error:
                why = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"{row.name:44}  {why}", flush=True)
                self.keep(part, name=row.name, error=why)
        if left:
            print(f"no time left for: {'; '.join(left)}")

    def keep(self, part: str, **result: Any) -> None:
        """Adds a row's result, in the file too."""
        self.found.setdefault(part, []).append(result)
        if self._file:
            self._file.write_text(json.dumps(self.found, indent=1))


# ---- predictions ---------------------------------------------------------------------------------


def fitting(every: list[Case]) -> list[Case]:
    """Prints what is predicted; returns what fits the memory.

    The planner knows no time of 8 bits, and their memory as that of 16.
    """
    if every:
        print(f"\n{'predicted':44}{'ms':>10}{'tokens/s/GPU':>14}{'MFU':>7}{'GiB':>8}")
    fit = []
    for case in every:
        p = case.plan
        rate = f"{1e3 * p.seconds:10.1f}{case.tokens / p.seconds:14,.0f}{case.mfu(p.seconds):7.1%}"
        rate = rate if case.policy == "bf16" else f"{'–':>10}{'–':>14}{'–':>7}"
        line = f"{case.name:44}{rate}{p.memory.total / GIB:8.1f}"
        if not p.fits:
            line += f"  left out: a program may have {p.machine.memory / GIB:.1f} GiB"
        else:
            fit.append(case)
        print(line, flush=True)
    return fit


def traced(case: Case, device: str | None = None) -> float:
    """What `xform.memory` says of loss and gradients, with the optimiser's two moments beside."""
    if not case.row.one_program:
        return math.nan
    f, params, rows = case.shapes()
    return memory(f, device=device)(params, rows).peak + 2 * bytes_of(params)


def compiled(case: Case) -> dict:
    """Prints what XLA gives a program for H200s, which need not be there."""
    start = time.perf_counter()
    f, params, rows = case.shapes()
    by_xla = plan.compiled_memory(f, params, rows, optimizer=2 * bytes_of(params)).total
    said = case.plan.memory.total, traced(case, "H200")
    sizes = "".join(f"{x / GIB:9.2f}" for x in (*said, by_xla))
    errors = "".join(f"{x / by_xla - 1:9.1%}" for x in said)
    print(f"{case.name:44}{sizes}{errors}{time.perf_counter() - start:7.0f}", flush=True)
    return dict(planner=said[0], memory=said[1], xla=by_xla)


# ---- steps ---------------------------------------------------------------------------------------


def train(run: Run, every: list[Case], steps: int) -> None:
    """Prints what steps take, beside what was predicted."""
    first: dict[Any, float] = {}
    peak = 0

    def one(case: Case) -> dict:
        nonlocal peak
        jax.clear_caches()
        said = traced(case)
        found = measured(case.row, case.model, case.length, steps, case.policy)
        loss = first.setdefault((case.model, case.policy), found.losses[0])
        print(line_of(case, said, found, found.losses[0] / loss - 1, peak), flush=True)
        peak = found.peak
        rate, predicted = case.tokens / found.seconds, case.plan.record()
        numbers = dict(tokens_per_second=rate, mfu=case.mfu(found.seconds), memory=said)
        return {**numbers, **asdict(found), "predicted": predicted}

    heads = ("tokens/s/GPU", 14), ("MFU", 7), ("GiB: planner, memory, XLA, peak", 40)
    heads += ("loss", 9), ("off by", 10), ("later", 9), ("ready s", 9)
    names = "".join(f"{name:>{width}}" for name, width in heads)
    print(f"\n{'measured':44}{'ms':>10}{'predicted':>10}{names}")
    run.each("train", every, one)


def line_of(case: Case, said: float, found: Measured, off_by: float, before: int) -> str:
    """A line of the table; a peak that was there before is an upper bound of this row's."""
    p, bound = case.plan, "≤" if found.peak == before else ""
    off = f"{p.seconds / found.seconds - 1:10.1%}" if case.policy == "bf16" else f"{'–':>10}"
    sizes = "".join(f"{x / GIB:10.1f}" for x in (p.memory.total, said, found.assigned))
    return (
        f"{case.name:44}{1e3 * found.seconds:10.1f}{off}{case.tokens / found.seconds:14,.0f}"
        f"{case.mfu(found.seconds):7.1%}{sizes}{f'{bound}{found.peak / GIB:.1f}':>10}"
        f"{found.losses[0]:9.4f}{off_by:10.1e}{found.losses[1]:9.4f}{found.ready:9.1f}"
    )


# ---- parity --------------------------------------------------------------------------------------


def parity(row: Row) -> dict:
    """Prints how far loss and gradients of a layout are from those of one device."""
    with jax.enable_x64(True):
        rows = random_rows(row.rows, 128)
        found = gradients_at_rest(row, SMALL, rows)
        loss, leaf, path = worst_of(found, on_one(SMALL, rows))
    right = loss < WORST and leaf < WORST
    wrong = "" if right else f", WRONG: above {WORST:.0e}"
    print(f"{row.name:44}{loss:13.1e}{leaf:11.1e}  {path}{wrong}", flush=True)
    return dict(loss=loss, gradients=leaf, leaf=path, right=right)


def gradients_at_rest(row: Row, model: llama.Config, rows: Rows) -> tuple[Any, Any]:
    """Loss and gradients on the host, layers in the model's order."""
    mesh = row.mesh()
    placed = pipelined.placement(row.layout, model, mesh, row.schedule)
    init = partial(pipelined.first_params, model, row.schedule)
    params = jax.jit(init, out_shardings=placed)(jax.random.key(0))
    grads_of = row.gradients(model, mesh, "f32")
    loss, grads = settle(grads_of(params, parallel.place_rows(rows, mesh)))
    return jax.device_get((loss, pipelined.at_rest(grads, row.schedule)))


def on_one(model: llama.Config, rows: Rows) -> tuple[Any, Any]:
    """The same of one device, without any layout."""
    params = llama.init(model, jax.random.key(0))
    return jax.device_get(mean_and_gradients(params, rows, model))


@partial(jax.jit, static_argnames="model")
def mean_and_gradients(params: dict, rows: Rows, model: llama.Config) -> tuple[Any, Any]:
    mean = lambda params: llama.loss(params, rows, model)[0] / rows.labels.size
    return jax.value_and_grad(mean)(params)


def random_rows(count: int, length: int) -> Rows:
    """Of different tokens, so that a row that went astray is seen."""
    tokens = np.random.default_rng(1).integers(0, SMALL.codes, (count, length), np.int32)
    return Rows(tokens, np.zeros_like(tokens), np.roll(tokens, -1, axis=1))


def worst_of(found: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[float, float, str]:
    """The error of the loss, and of the worst gradient, relative to its largest number."""

    def off(x, y) -> float:
        error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
        return math.inf if math.isnan(error) else error

    leaves = jax.tree.leaves_with_path(jax.tree.map(off, found[1], right[1]))
    path, worst = max(leaves, key=lambda leaf: leaf[1])
    return off(found[0], right[0]), worst, jax.tree_util.keystr(path, simple=True, separator="/")


# ---- targets -------------------------------------------------------------------------------------


def targets(results: list[dict]) -> None:
    """Prints what was aimed at, beside what was found."""
    rate = {row["name"]: row.get("tokens_per_second", math.nan) for row in results}
    print(f"\n{'target':44}{'at least':>10}{'found':>10}")
    for title, least, row, *other in TARGETS:
        found = rate.get(row, math.nan) / (rate.get(other[0], math.nan) if other else 1)
        said = "not run" if math.isnan(found) else f"{found:,.{0 if least > 10 else 2}f}"
        holds = "" if math.isnan(found) else "  holds" if found >= least else "  missed"
        print(f"{title:44}{least:>10,}{said:>10}{holds}")


# ---- the command ---------------------------------------------------------------------------------


def asked_for() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, help="these parts")
    parser.add_argument(
        "--rows", default="", help="rows whose name contains one of these, by commas"
    )
    parser.add_argument("--steps", type=int, default=5, help="of a row, after two")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no row begins")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--compile-only", type=int, choices=list(LAYOUTS), metavar="N",
                        help="what XLA says of the programs for N H200s")  # fmt: skip
    given = parser.parse_args()
    parts = given.rows.split(",")
    given.asks_for = lambda name: any(part.strip() in name for part in parts)
    return given


def main() -> None:
    given = asked_for()
    if given.compile_only or not Path("/dev/nvidiactl").exists():
        jax.config.update("jax_platforms", "cpu")
    cpu_devices(given.compile_only or 8)
    print(heading(), flush=True)
    run = Run(given.seconds, given.json)
    if given.compile_only:
        print("\ncompiled for H200s; GiB of a device, moments of the optimiser included")
        print(f"{'':44}{'planner':>9}{'memory':>9}{'XLA':>9}{'planner':>9}{'memory':>9}{'s':>7}")
        of_one = [c for c in cases(given) if c.row.one_program]
        run.each("compiled", [c for c in of_one if c.row.devices == usable()], compiled)
    else:
        parts(run, given)
    print(f"\n{run.taken:.0f} s in all")
    every = [row for part in run.found.values() for row in part]
    sys.exit(any("error" in row or not row.get("right", True) for row in every))


def parts(run: Run, given: argparse.Namespace) -> None:
    """Prints all that is asked for."""
    on_gpu = jax.default_backend() == "gpu"
    given.tiny = given.tiny or not on_gpu
    only, layouts = given.only or (PARTS if on_gpu else ["parity"]), LAYOUTS[usable()]
    fit = fitting(cases(given)) if "train" in only else []
    if "parity" in only:
        print(f"\n{'parity, float64':44}{'loss off by':>13}{'gradients':>11}  worst leaf")
        run.each("parity", [row_of(name) for name in layouts if given.asks_for(name)], parity)
    if fit:
        train(run, fit, given.steps)
        targets(run.found.get("train", []))
    if usable() == 1:
        return
    if "schedules" in only:
        schedules(run, pipeline_gpu.TINY if given.tiny else pipeline_gpu.Size())
    if "context" in only and run.time_left() > 0:
        row = context_gpu.TINY if given.tiny else context_gpu.Row(131_072, "causal")
        mesh = row_of(f"cp={usable()}").mesh()
        context_gpu.title(mesh)
        run.keep("context", **context_gpu.measure(row, mesh))


def schedules(run: Run, size: pipeline_gpu.Size) -> None:
    """Prints the table of pipelines over all devices."""
    ranks = usable()
    # At least one for each of two stages of a rank.
    size = replace(size, layers=max(size.layers, 2 * ranks))
    bench = pipeline_gpu.Bench(size, make_mesh(pp=ranks, devices=jax.devices()[:ranks]))
    pipeline_gpu.table(bench, [*pipeline_gpu.BUILDERS], run.time_left)
    for (executor, name, microbatches), (seconds, bound) in bench.found.items():
        how = dict(executor=executor, schedule=name, microbatches=microbatches)
        run.keep("schedules", **how, seconds=seconds, bound=bound)


if __name__ == "__main__":
    main()
