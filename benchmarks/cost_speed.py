"""How long `cost` and `memory` take, beside tracing: 4,000 equations, and 405 billion parameters.

`PYTHONPATH=examples python benchmarks/cost_speed.py`. Each program has a process of its own, which
never counted before. `FLOPs` and `bytes` are the totals of a program never seen, `lines` all else
(the cost of every equation by line), made when it is first asked for, and `again` a whole call,
`cost(f)(…)` with FLOPs, bytes and lines, of a function that was counted before: JAX remembers its
trace, and xform what it counted. `loop` is a loop over the equations that looks at nothing but the
types of one operand and one result: what Python takes at the least.
"""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import llama
from xform import cost, memory
from xform._cost import cost_of
from xform.jaxpr import trace, walk
from xform.train import Rows

S = jax.ShapeDtypeStruct


def f32(*shape: int) -> S:
    return S(shape, jnp.float32)


def unrolled(width: int) -> tuple[Any, ...]:
    """A loss and its gradients, its layers written out one by one: no equation is shared."""

    def loss(ws, x):
        for w in ws:
            norm = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
            x = x + jnp.tanh(norm @ w) * 0.5
        return (x * x).sum()

    return jax.value_and_grad(loss), [f32(width, width)] * 85, f32(32, width)


def chain() -> tuple[Any, ...]:
    def f(x, y, z, w):
        for _ in range(1334):
            x = x + y + z * w
        return x

    return f, *[f32(10)] * 4


def ragged() -> tuple[Any, ...]:
    """Every equation has a shape of its own: nothing that was learnt of one serves another."""

    def f(*xs):
        return [jnp.tanh(x * 2.0) + x for x in xs]

    return f, *[f32(n) for n in range(1, 1335)]


def shared() -> tuple[Any, ...]:
    """Layers that `jax.jit` traces once and calls often."""

    @jax.jit
    def layer(x, w):
        for _ in range(20):
            x = jnp.tanh(x @ w) * 2 + x
        return x

    def f(x, w):
        for _ in range(50):
            x = layer(x, w)
        return x

    return f, f32(8, 8), f32(8, 8)


PROGRAMS = {
    "gradients of 85 layers, unrolled": partial(unrolled, 64),
    "a chain of sums": chain,
    "1,334 shapes": ragged,
    "50 calls of one layer": shared,
}


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def of_program(name: str) -> None:
    f, *args = PROGRAMS[name]()
    found = []
    tracing = seconds(lambda: found.append(trace(f, *args)))
    (jaxpr,) = found
    look = lambda: [(e.primitive, e.invars[0].aval, e.outvars[0].aval) for e in jaxpr.eqns]
    loop = min(seconds(look) for _ in range(10))
    counts: list[Any] = []
    flops = seconds(lambda: counts.append(cost_of(jaxpr)))
    (costs,) = counts
    moved = seconds(lambda: costs.bytes)
    lines = seconds(costs.by_line)

    def all_of() -> None:
        costs = cost(f)(*args)
        _ = costs.flops, costs.bytes, costs.by_line()

    all_of()
    again = min(seconds(all_of) for _ in range(10))
    equations = sum(1 for _ in walk(jaxpr))
    times = (tracing, loop, flops, moved, lines, again)
    print(f"{name:34s} {equations:9,d} " + " ".join(f"{1e3 * t:9.2f}" for t in times), flush=True)


def large() -> None:
    """A training step of Llama 3.1's 405 billion parameters, from shapes alone."""
    config = llama.Config(
        codes=128_256, layers=126, width=16_384, heads=128, kv_heads=8, head_size=128,
        hidden=53_248, rope_base=500_000.0,
    )  # fmt: skip
    params = jax.eval_shape(partial(llama.init, config), jax.random.key(0))
    optimizer = optax.adamw(1e-4)
    state = jax.eval_shape(optimizer.init, params)
    rows = jax.eval_shape(lambda: Rows(*[np.zeros((2, 8192), np.int32)] * 3))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rows):
        grads = jax.grad(lambda p: llama.loss(p, rows, config)[0])(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    count = sum(x.size for x in jax.tree.leaves(params))
    found: list[Any] = []
    counting = seconds(lambda: found.append(cost(step)(params, state, rows)))
    print(f"\n{count / 1e9:.1f} billion parameters, {config.layers} layers, 16,384 tokens")
    of_formula = 2 * 8192 * llama.flops_per_token(config, 8192)
    table = seconds(lambda: str(found[0]))
    print(f"cost    {counting + table:6.1f} s  model {found[0].model_flops:.4g} FLOP", end="")
    print(f", by the formula {of_formula:.4g}")
    planning = seconds(lambda: found.append(memory(step)(params, state, rows)))
    print(f"memory  {planning:6.1f} s  peak {found[1].peak / 1e12:.3g} TB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"the process used {peak / 1e9:.2f} GB at most")


def main() -> None:
    if len(sys.argv) > 1:
        return large() if sys.argv[1] == "large" else of_program(sys.argv[1])
    print("$ PYTHONPATH=examples python benchmarks/cost_speed.py")
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {os.cpu_count()} cores\n")
    columns = ("trace", "loop", "FLOPs", "bytes", "lines", "again")
    print(
        f"{'milliseconds':34s} {'equations':>9s} " + " ".join(f"{c:>9s}" for c in columns),
        flush=True,
    )
    for name in (*PROGRAMS, "large"):
        subprocess.run([sys.executable, __file__, name], check=True)
    return None


if __name__ == "__main__":
    main()
