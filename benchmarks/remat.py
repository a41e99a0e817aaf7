"""`xform.remat` beside JAX's checkpoint policies, on the example model: memory and time of a step.

    export PYTHONPATH=examples
    python benchmarks/remat.py [--layers 16 --width 256 --batch 8 --length 256]
    python benchmarks/remat.py --width 2048 --batch 1 --length 4096 --precision bf16 \
        --policies dots_with_no_batch_dims
    python benchmarks/remat.py --budgets 10 --width 128 --batch 4 [--unrolled] [--device H200]

Each policy's row is followed by `remat` with the bytes that XLA assigned to the policy as its
budget. Steps of all rows take turns in one process, forwards and backwards, and the median counts.

With `--budgets` nothing runs: so many budgets, from a little more than "all" needs to the least,
each beside what `remat.report` says and what XLA's buffer assignment takes, compiled for the
device, which need not be there. It fails where one takes over 5 % more, or more than a larger one.
"""

import argparse
import functools
import statistics
import sys
import time

import jax
import numpy as np

import llama
from xform import BudgetError, cost, precision, remat
from xform._hlo import compile_for
from xform.train import Rows

# What no budget repeats unless it is asked to.
NEVER = ("reductions", "random", "collectives")
POLICIES = ("dots", "dots_with_no_batch_dims", "nothing")


def losses(config: llama.Config, policies, cast):
    """Returns the loss with each policy on its layers, and first with JAX's own choice."""

    def with_policy(policy):
        layer = llama.layer

        def checkpointed(x, p, mask, rotation, *how, **options):
            run = lambda x, p, mask, rotation: layer(x, p, mask, rotation, *how, **options)
            saves = getattr(jax.checkpoint_policies, f"{policy}_saveable")
            return jax.checkpoint(run, policy=saves, prevent_cse=False)(x, p, mask, rotation)

        def loss(params, rows):
            llama.layer = layer if policy is None else checkpointed
            try:
                return cast(lambda p, rows: llama.loss(p, rows, config)[0])(params, rows)
            finally:
                llama.layer = layer

        return loss

    return {name or "jax.grad": with_policy(name) for name in (None, *policies)}


def one_program(step, x, layers):
    """Applies the layers, each in equations of its own."""
    return functools.reduce(step, layers, x)


def temporaries(f, device, *args) -> int:
    """The bytes that XLA assigns to a step beside arguments and results."""
    step = jax.value_and_grad(f)
    if device == "cpu":
        done = jax.jit(step).lower(*args).compile()
    else:
        done = compile_for(device, step, *args)
    return done.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]


def print_budgets(config: llama.Config, shape, count: int, device: str, *, unrolled: bool) -> bool:
    """Prints what so many budgets need; returns whether all hold, and none more than a larger."""
    params = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
    rows = jax.eval_shape(lambda: Rows(*[np.zeros(shape, np.int32)] * 3))
    if unrolled:
        one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), params["layers"])
        params = {**params, "layers": [one] * config.layers}
    scan = one_program if unrolled else llama.one_by_one
    loss = lambda params, rows: llama.loss(params, rows, config, scan=scan)[0]
    report = lambda b: remat.report(loss, budget=b, device=device, argnums=0)(params, rows)
    most, least = report("all").peak, report(0.0).peak
    form = "unrolled" if unrolled else "scanned"
    print(f"{device}, layers {form}, {config}, batch {shape}; jax {jax.__version__}; in MB")
    print(f"{'budget':>10}{'said':>10}{'XLA':>10}{'of budget':>12}")
    known, before, holds = {}, None, True
    for budget in map(int, np.linspace(1.05 * most, least, count)):
        told = report(budget)
        plan = told.saved, told.recomputed
        if plan not in known:
            known[plan] = temporaries(
                remat(loss, budget=budget, device=device), device, params, rows
            )
        need = known[plan]
        wrong = need > 1.05 * budget or (before is not None and need > before)
        wrong |= not {v.kind for v in told.recomputed}.isdisjoint(NEVER)
        sizes = "".join(f"{n / 2**20:10.1f}" for n in (budget, told.peak, need))
        print(f"{sizes}{need / budget:12.3f}{'  WRONG' if wrong else ''}", flush=True)
        before, holds = need, holds and not wrong
    return holds


def main():
    parser = argparse.ArgumentParser()
    sizes = dict(layers=16, width=256, batch=8, length=256, steps=7)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", help="a policy of `xform.precision`; float32 without it")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="these rows alone")
    parser.add_argument("--budgets", type=int, help="so many budgets, compiled and not run")
    parser.add_argument("--device", default="cpu", help="what budgets are compiled for: cpu, H200")
    parser.add_argument("--unrolled", action="store_true", help="budgets of layers in a row")
    args = parser.parse_args()
    size = 32 if args.width < 1024 else 128
    heads = dict(heads=args.width // size, kv_heads=args.width // size // 2, head_size=size)
    config = llama.Config(layers=args.layers, width=args.width, hidden=5 * args.width // 2, **heads)
    if args.budgets:
        shape, how = (args.batch, args.length), dict(unrolled=args.unrolled)
        sys.exit(not print_budgets(config, shape, args.budgets, args.device, **how))
    cast = (lambda f: precision(f, args.precision)) if args.precision else lambda f: f
    params = llama.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    shape = (args.batch, args.length)
    draw = lambda high: rng.integers(0, high, shape, np.int32)
    rows = Rows(draw(config.codes), draw(1), draw(config.codes))

    plain, *others = losses(config, args.policies or POLICIES, cast).items()
    steps, told = {}, {}

    def add(name, f):
        start = time.perf_counter()
        lowered = jax.jit(jax.value_and_grad(f)).lower(params, rows)
        traced = time.perf_counter() - start
        steps[name] = lowered.compile()
        temp = steps[name].memory_analysis().temp_size_in_bytes
        work = cost(jax.value_and_grad(f))(params, rows)
        told[name] = temp, float(work.flops), traced
        return temp

    for name, f in others if args.policies else [plain, *others]:
        temp = add(name, f)
        try:
            add(f"  remat({temp / 2**20:.0f} MB)", remat(plain[1], budget=temp))
        except BudgetError as error:
            print(error)
    if not args.policies:
        add("  remat('all')", remat(plain[1]))
        add("  remat('none')", remat(plain[1], budget="none"))
    seconds = {name: [] for name in steps}
    for turn in range(2 * args.steps):
        for name in [*steps][:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(steps[name](params, rows))
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"{jax.devices()[0].device_kind}, {config}, batch {shape}")
    print(f"{'':26}  temporaries   step        work       trace")
    for name, (temp, work, traced) in told.items():
        print(
            f"{name:26}  {temp / 2**20:7.1f} MB  {median[name] * 1e3:7.1f} ms  "
            f"{work / 1e9:7.2f} GF  {traced:5.2f} s"
        )


if __name__ == "__main__":
    main()
