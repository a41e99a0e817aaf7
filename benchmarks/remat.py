"""`xform.remat` beside JAX's checkpoint policies, on the example model: memory and time of a step.

    python benchmarks/remat.py [--layers 16 --width 256 --batch 8 --length 256]
    python benchmarks/remat.py --width 2048 --batch 1 --length 4096 --precision bf16 \
        --policies dots_with_no_batch_dims

Each policy's row is followed by `remat` with the bytes that XLA assigned to the policy as its
budget. Steps of all rows take turns in one process, forwards and backwards, and the median counts.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import llama
from xform import BudgetError, cost, precision, remat
from xform.train import Rows

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


def main():
    parser = argparse.ArgumentParser()
    sizes = dict(layers=16, width=256, batch=8, length=256, steps=7)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", help="a policy of `xform.precision`; float32 without it")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="these rows alone")
    args = parser.parse_args()
    size = 32 if args.width < 1024 else 128
    heads = dict(heads=args.width // size, kv_heads=args.width // size // 2, head_size=size)
    config = llama.Config(layers=args.layers, width=args.width, hidden=5 * args.width // 2, **heads)
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
