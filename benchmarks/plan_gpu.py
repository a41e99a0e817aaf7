"""What a step of the examples takes on one and two H200s, beside what `xform.sharding.plan` said.

    python3 benchmarks/plan_gpu.py              # predictions, parts, then steps, in four minutes
    python3 benchmarks/plan_gpu.py --stages     # on one GPU: the programs of the pipeline's stages
    python3 benchmarks/plan_gpu.py --tiny       # small shapes on virtual CPU devices: does it run?

A step is that of examples/train.py, as layouts.py takes it. All predictions are printed before
anything is measured. A model of a billion parameters: 16 layers of width 2,048 and 8,192 units, 16
heads of 128 on 8 keys, a vocabulary of 32,768, rows of 8,192 tokens, bfloat16 from float32.

Below the predictions, what they are made of is measured, beside what the table of rates makes of
it: products by shape, attention, memory, messages between two GPUs. Of a row that fails the reason
is printed, and the next one runs; what `--seconds` leave no time for is named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import P  # noqa: E402

import llama  # noqa: E402
import parallel  # noqa: E402
import pipelined  # noqa: E402
import planned  # noqa: E402
from benchmarks.layouts import BILLION, Row, batch, heading, measured, predicted  # noqa: E402
from xform import causal, flex_attention  # noqa: E402
from xform.sharding import cpu_devices, make_mesh, plan  # noqa: E402
from xform.sharding.pipeline import (  # noqa: E402
    Action,
    Times,
    interleaved,
    one_f_one_b,
    per_stage,
    simulate,
)
from xform.sharding.pipeline._greedy import in_turn  # noqa: E402
from xform.sharding.plan._compute import passes, product  # noqa: E402
from xform.sharding.plan._messages import Group, collective  # noqa: E402
from xform.sharding.plan._time import work_of  # noqa: E402

SMALL = llama.Config(codes=256, layers=4, width=64, heads=4, kv_heads=2, head_size=16, hidden=128)


ONE, FSDP = parallel.PLAIN, parallel.Layout(fsdp=True)
ROWS = (
    Row("one GPU", dict(dp=1, tp=1), ONE, 2),
    Row("one GPU, layers recomputed", dict(dp=1, tp=1), FSDP, 4),
    Row("fsdp=2", dict(dp=2, tp=1), FSDP, 8),
    Row("tp=2", dict(dp=1, tp=2), parallel.Layout(sequence=True), 2),
    Row("pp=2, 1F1B", dict(dp=1, pp=2, tp=1), ONE, 8, 8),
    Row("dp=2", dict(dp=2, tp=1), ONE, 4),
    Row("one GPU, one row", dict(dp=1, tp=1), ONE, 1),
)


# ---- steps ---------------------------------------------------------------------------------------


def table_of_steps(model: llama.Config, length: int, given: Any, start: float) -> None:
    """Prints the predictions, then measures."""
    rows = [r for r in ROWS if r.devices <= jax.device_count()]
    plans = {row.name: predicted(row, model, length) for row in rows}
    print("\npredicted, before anything is measured:")
    for row in rows:
        p = plans[row.name]
        shares = "  ".join(f"{name} {1e3 * s:.1f}" for name, s in p.step.parts.items())
        print(
            f"  {row.name:28}{row.rows:3} rows {1e3 * p.seconds:9.1f} ms = {shares}; "
            f"{p.memory.total / 2**30:.1f} GiB",
            flush=True,
        )
    if not given.skip_parts:
        parts(model, length, given.tiny)
    print(
        f"\n{'layout':28}{'rows':>5}{'predicted ms':>14}{'measured ms':>13}{'error':>8}{'MFU':>7}"
        f"{'GiB, peak of process':>22}{'ready s':>9}"
    )
    errors, left = [], []
    for row in rows:
        if time.perf_counter() - start > given.seconds:
            left.append(row.name)
            continue
        p = plans[row.name]
        try:
            found = measured(row, model, length, 2 if given.tiny else 5)
        except Exception as error:  # a row that fails is a finding, not the end of the table
            print(f"{row.name:28} {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            jax.clear_caches()
        off = p.seconds / found.seconds - 1
        errors.append(abs(off))
        print(
            f"{row.name:28}{row.rows:5}{1e3 * p.seconds:14.1f}{1e3 * found.seconds:13.1f}{off:8.1%}"
            f"{p.mfu * p.seconds / found.seconds:7.1%}{found.peak / 2**30:22.1f}{found.ready:9.1f}",
            flush=True,
        )
    if left:
        print(f"no time left for: {', '.join(left)}")
    if errors:
        print(f"mean error {np.mean(errors):.1%}, largest {max(errors):.1%}")


# ---- parts ---------------------------------------------------------------------------------------


def seconds_of(f: Callable, *args: Any, calls: int = 8) -> float:
    """Of one of several calls in flight, at least half a second of them, hot."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    found: list[float] = []
    while len(found) < 3 or (sum(found) * calls < 0.4 and len(found) < 40):
        before = time.perf_counter()
        jax.block_until_ready([f(*args) for _ in range(calls)])
        found.append((time.perf_counter() - before) / calls)
    return median(found[1:])


def parts(model: llama.Config, length: int, tiny: bool) -> None:
    """Prints what is measured of products, attention, memory and messages, beside the rates."""
    one, scale = plan.machine("H200", 1), 64 if tiny else 1
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    D, F, C = model.width, model.hidden, model.codes
    H, K, d = model.heads, model.kv_heads, model.head_size
    n = 2 * length
    shapes = [
        (n, D, D), (n, D, K * d), (n, D, F), (n, F, D), (D, n, F), (n, D // 2, D), (n, F // 2, D),
        (n, D, F // 2), (n, D, C), (8192, 8192, 8192), (8192, 512, 8192), (8192, 16384, 6656),
    ]  # fmt: skip
    print("\nproduct [m, k] × [k, n]        TFLOP/s  by the rates")
    for m, k, out in [tuple(max(8, x // scale) for x in shape) for shape in shapes]:
        s = seconds_of(lambda a, b: a @ b, draw(0, m, k), draw(1, k, out))
        flops, by = 2 * m * k * out / 1e12, product(m, k, out, one)
        print(f"{m:7} {k:7} {out:7} {flops / s:12.0f} {flops / by:13.0f}", flush=True)
    T = length // scale
    q, k, v = draw(2, 2, T, H, d), draw(3, 2, T, K, d), draw(4, 2, T, K, d)
    attend = lambda q, k, v: flex_attention(q, k, v, mask_mod=causal())
    forward = seconds_of(attend, q, k, v)
    both = seconds_of(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do), q, k, v, q)
    flops = 2 * 4 * T * T / 2 * H * d / 1e12
    rates = [one.peak() * share / 1e12 for share in one.rates.attention]
    print(
        f"attention, causal, {T} tokens: forward {flops / forward:.0f} TFLOP/s ({rates[0]:.0f}), "
        f"backward {2.5 * flops / (both - forward):.0f} ({rates[1]:.0f})",
        flush=True,
    )
    x = draw(5, 2**28 // scale)
    stream = 3 * x.nbytes / seconds_of(lambda x, y: x * y + x, x, x[::-1])
    print(
        f"memory: {stream / 1e12:.2f} TB/s ({one.device.bandwidth * one.rates.stream / 1e12:.2f})"
    )
    if jax.device_count() > 1:
        messages(2**26 // scale)


def messages(size: int) -> None:
    """Prints what collectives of two GPUs take."""
    mesh, two = make_mesh(tp=2, devices=jax.devices()[:2]), plan.machine("H200", 2)
    x = jax.device_put(jnp.ones(size, jnp.bfloat16), jax.NamedSharding(mesh, P("tp")))
    whole = jax.device_put(jnp.ones(size, jnp.bfloat16), jax.NamedSharding(mesh, P()))
    gather = lambda x: jax.lax.all_gather(x, "tp", tiled=True)
    scatter = lambda x: jax.lax.psum_scatter(jax.lax.pcast(x, "tp", to="varying"), "tp", tiled=True)
    cases = {
        "all-gather": (gather, P("tp"), P("tp"), x),
        "reduce-scatter": (scatter, P(), P("tp"), whole),
    }
    for name, (f, before, after, given) in cases.items():
        run = jax.shard_map(f, mesh=mesh, in_specs=before, out_specs=after)
        s = seconds_of(run, given)
        by = collective(name, 2 * size, Group(2, 1), two)
        print(
            f"{name} of {2 * size / 2**20:.0f} MiB: {1e3 * s:.3f} ms ({1e3 * by:.3f})", flush=True
        )


# ---- the stages of a pipeline --------------------------------------------------------------------


def stages(model: llama.Config, length: int) -> None:
    """Prints what both stages' programs take in turn on one GPU, and the step that makes.

    One rank owns both stages, so that what each pass takes is measured without a second GPU; the
    simulator makes a step of two ranks of that, which the planner's number stands beside.
    """
    row = next(row for row in ROWS if row.schedule)
    schedule, mesh = interleaved(1, 2, 2), make_mesh(dp=1, pp=1, tp=1, devices=jax.devices()[:1])
    specs = pipelined.specs_for(row.layout, model, mesh, schedule)
    make = jax.jit(
        partial(pipelined.first_params, model, schedule),
        out_shardings=pipelined.placement(row.layout, model, mesh, schedule),
    )
    params = make(jax.random.key(0))
    whole = batch(schedule.microbatches, length, model.codes)
    at = jax.NamedSharding(mesh, P(None, *parallel.of_rows(mesh)))
    rows = jax.tree.map(lambda x: jax.device_put(x[:, None], at), whole)
    run = per_stage(
        *pipelined.functions_of(row.layout, model, specs, "bf16"),
        mesh=mesh, weights=specs["layers"], shared=pipelined.ends(specs), batch=at.spec,
        enter=partial(pipelined.enter, layout=row.layout, specs=specs),
    )  # fmt: skip
    trees = params["layers"], pipelined.ends(params), rows
    alone, found = in_turn(schedule, split=False), {}
    for _ in range(3):  # the first compiles
        found = run._start(alone, trees).timed(split=False)
        print({f"{kind}{stage}": round(1e3 * s, 2) for (kind, stage), s in found.items()})
    once, before = run._start(alone, trees), time.perf_counter()
    once.do(Action("F", 0, 0))
    sent = time.perf_counter() - before
    jax.block_until_ready(list(once.held.values.values()))
    done = time.perf_counter() - before
    print(f"F of stage 0: sent off in {1e3 * sent:.1f} ms, done after {1e3 * done:.1f}", flush=True)
    del once
    split = planned.layout_of(row.axes, row.layout, row.schedule, fused=model.fuse is not False)
    on, shape = plan.machine("H200", 2), plan.Model.of(model, length)
    told = work_of(shape, split, passes(shape, on, split, row.rows * length)).times
    taken = Times(*[[found[kind, stage] for stage in (0, 1)] for kind in "FB"], send=told.send)
    pipe = one_f_one_b(2, row.microbatches or 1)
    print(f"{'ms':16}{'F of stage 0':>14}{'1':>9}{'B of stage 0':>14}{'1':>9}{'pp=2, 1F1B':>12}")
    for name, times in (("measured", taken), ("by the planner", told)):
        each = [1e3 * times.of(Action(kind, stage, 0)) for kind in "FB" for stage in (0, 1)]
        end = 1e3 * simulate(pipe, times).end
        print(
            f"{name:16}{each[0]:14.1f}{each[1]:9.1f}{each[2]:14.1f}{each[3]:9.1f}{end:12.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--skip-parts", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--seconds", type=float, default=170, help="after which no row begins")
    given, start = parser.parse_args(), time.perf_counter()
    if given.tiny:
        jax.config.update("jax_platforms", "cpu")
        cpu_devices(2)
    print(heading())
    model, length = (SMALL, 128) if given.tiny else (BILLION, 8192)
    if given.stages:
        stages(model, length)
    else:
        table_of_steps(model, length, given, start)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
