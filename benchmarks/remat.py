"""`xform.remat` beside JAX's checkpoint policies, on the example model: memory and time of a step.

    python benchmarks/remat.py [--layers 16 --width 256 --batch 8 --length 256]

Each policy's row is followed by `remat` with the bytes that XLA assigned to the policy as its
budget. Steps of all rows take turns in one process, and the shortest of each counts.
"""

import argparse
import time

import jax
import numpy as np

import llama
from xform import BudgetError, cost, remat
from xform.train import Rows

POLICIES = ("everything", "dots", "dots_with_no_batch_dims", "nothing")


def losses(config: llama.Config):
    """Returns the loss with each policy on its layers; None for JAX's own choice."""

    def with_policy(policy):
        layer = llama.layer

        def checkpointed(x, p, mask, rotation, *how, **options):
            run = lambda x, p, mask, rotation: layer(x, p, mask, rotation, *how, **options)
            saves = getattr(jax.checkpoint_policies, f"{policy}_saveable")
            return jax.checkpoint(run, policy=saves, prevent_cse=False)(x, p, mask, rotation)

        def loss(params, rows):
            llama.layer = layer if policy is None else checkpointed
            try:
                return llama.loss(params, rows, config)[0]
            finally:
                llama.layer = layer

        return loss

    return {name or "jax.grad": with_policy(name) for name in (None, *POLICIES[1:])}


def main():
    parser = argparse.ArgumentParser()
    sizes = dict(layers=16, width=256, batch=8, length=256, steps=7)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = llama.Config(layers=args.layers, width=args.width, hidden=5 * args.width // 2)
    params = llama.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    shape = (args.batch, args.length)
    draw = lambda high: rng.integers(0, high, shape, np.int32)
    rows = Rows(draw(config.codes), draw(1), draw(config.codes))

    plain, *_ = found = losses(config).items()
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

    for name, f in found:
        temp = add(name, f)
        try:
            add(f"  remat({temp / 2**20:.0f} MB)", remat(plain[1], budget=temp))
        except BudgetError as error:
            print(error)
    add("  remat('all')", remat(plain[1]))
    add("  remat('none')", remat(plain[1], budget="none"))
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(args.steps):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, rows))
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"{jax.devices()[0].device_kind}, {config}, batch {shape}")
    print(f"{'':26}  temporaries   step        work       trace")
    for name, (temp, work, traced) in told.items():
        print(
            f"{name:26}  {temp / 2**20:7.1f} MB  {best[name] * 1e3:7.0f} ms  "
            f"{work / 1e9:7.2f} GF  {traced:5.2f} s"
        )


if __name__ == "__main__":
    main()
