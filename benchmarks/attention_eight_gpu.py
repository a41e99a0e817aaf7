"""Attention in 8 bits beside bfloat16, forward, on one GPU: times and errors.

    python3 benchmarks/attention_eight_gpu.py

One process, one table. Rows take turns, so that all meet the same clock and heat; a time is the
median over rounds of some calls in flight. "arrays" rounds q, k and v to 8 bits, which rows of e4m3
do too. TFLOP/s count the two products, half of it where the mask is causal. Errors are of some rows
of one head, relative, against attention in float32: of normal numbers, and of the same with values
about 1, where a sum's lost digits show.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from xform import causal, flex_attention  # noqa: E402
from xform.lowering.mosaic_gpu._narrow import in_eight  # noqa: E402

ROUNDS, CALLS, HEADS, SIZE = 5, 6, 16, 128
SHAPES = {"16k": (1, 16384), "4k": (4, 4096)}


def arrays(batch: int, length: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (batch, length, HEADS, SIZE), jnp.bfloat16) for key in keys]


@jax.jit
def truth(q, k, v):
    """Some rows of one head, in float32, without a mask."""
    q, k, v = (x[0, :, -1].astype(jnp.float32) for x in (q, k, v))
    scores = jnp.matmul(q[::64], k.T, precision="highest") * SIZE**-0.5
    return jnp.matmul(jax.nn.softmax(scores, -1), v, precision="highest")


def error(f: Callable, q, k, v) -> float:
    true = truth(q, k, v)
    found = f(q, k, v)[0, ::64, -1].astype(jnp.float32)
    return float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true))


def milliseconds(run: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(CALLS)])
    return 1e3 * (time.perf_counter() - start) / CALLS


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    runs: dict[str, tuple[Callable, float]] = {}
    errors: dict[str, str] = {}
    for size, (batch, length) in SHAPES.items():
        q, k, v = arrays(batch, length)
        flops = 4 * batch * length**2 * HEADS * SIZE
        for mask, share in ((None, 1.0), (causal(), 0.5)):
            for format in (None, "e4m3"):
                name = f"{size} {'full' if mask is None else 'causal'}, {format or 'bf16'}"
                f = jax.jit(partial(flex_attention, mask_mod=mask, format=format))
                if mask is None:
                    errors[name] = f"{error(f, q, k, v):.1e} | {error(f, q, k, v + 1):.1e}"
                runs[name] = partial(f, q, k, v), share * flops
        runs[f"{size}, arrays"] = partial(jax.jit(in_eight), q, k, v), 0.0
    for run, _ in runs.values():
        jax.block_until_ready(run())
    rounds = [{name: milliseconds(run) for name, (run, _) in runs.items()} for _ in range(ROUNDS)]
    print(
        "\n| | ms | TFLOP/s | × bf16 | error | error, values about 1 |\n|---|---|---|---|---|---|"
    )
    for name, (_, flops) in runs.items():
        ms = median(times[name] for times in rounds)
        beside = name.replace("e4m3", "bf16")
        ratio = median(times[beside] for times in rounds) / ms
        rate = f"{flops / ms / 1e9:.0f} | {ratio:.2f}" if flops else "– | –"
        print(f"| {name} | {ms:.3f} | {rate} | {errors.get(name, '– | –')} |")


if __name__ == "__main__":
    main()
