"""Gradients of attention with a bias of pairs that the batch shares, on one GPU, beside tokamax.

    python3 benchmarks/attention_pairs_gpu.py

The shape is of AlphaFold's triangle attention: 768 rows of 768 tokens, 4 heads of 64, and a bias
`[4, 768, 768]`. Times are of the backward pass alone, medians of rounds in turns; temporaries are
what the compiled program takes beside its arguments and results. The error of each gradient is
relative, against float32.
"""

# pyright: reportMissingImports=false
# Peers are no dependencies.

from __future__ import annotations

import sys
import time
import types
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xform import flex_attention

B, T, H, D = 768, 768, 4, 64
ROUNDS, CALLS = 7, 6


def xform(q, k, v, bias, *, deterministic: bool = True, moving: bool = True):
    bias = bias if moving else jax.lax.stop_gradient(bias)
    return flex_attention(
        q, k, v,
        score_mod=lambda s, b, h, q, k: s + bias[h, q, k],
        deterministic=deterministic, implementation="mosaic_gpu",
    )  # fmt: skip


def tokamax(q, k, v, bias):
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):  # a profiler that it imports
        module = types.ModuleType(name)
        vars(module).update(__path__=[], get_kernel_stats_tool=None)
        sys.modules.setdefault(name, module)
    from tokamax import dot_product_attention

    return dot_product_attention(q, k, v, bias=bias[None], implementation="mosaic_gpu")


PEERS = {
    "xform": xform, "xform, any order": partial(xform, deterministic=False),
    "xform, no gradient of the bias": partial(xform, moving=False), "tokamax": tokamax,
}  # fmt: skip


@jax.jit
def truth(q, k, v, bias, ct):
    """All gradients in float32, an entry of the batch after another."""

    def one(total, x):
        *heads, ct = (a.astype(jnp.float32) for a in x)

        def attend(q, k, v, bias):
            s = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") / D**0.5 + bias
            return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s), v, precision="highest")

        with jax.default_matmul_precision("highest"):
            *own, of_bias = jax.vjp(attend, *heads, bias)[1](ct)
        return total + of_bias, own

    bias = bias.astype(jnp.float32)
    of_bias, own = jax.lax.scan(one, jnp.zeros_like(bias), (q, k, v, ct))
    return *own, of_bias


@jax.jit
def errors(found, true):
    norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32).ravel())
    return [norm(a - b) / norm(b) for a, b in zip(found, true, strict=True)]


def milliseconds(call) -> float:
    start = time.perf_counter()
    for _ in range(CALLS - 1):
        call()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - start) / CALLS


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, ct = (jax.random.normal(key, (B, T, H, D), jnp.bfloat16) for key in keys[:4])
    bias = jax.random.normal(keys[4], (H, T, T), jnp.bfloat16)
    true, calls = truth(q, k, v, bias, ct), {}
    for name, attend in PEERS.items():
        try:
            _, pull_back = jax.jit(partial(jax.vjp, attend))(q, k, v, bias)
            run = jax.jit(lambda pull_back, ct: pull_back(ct)).lower(pull_back, ct).compile()
            found = run(pull_back, ct)
            again = run(pull_back, ct)
        except Exception as e:
            print(f"no {name}: {type(e).__name__} {str(e)[:120]}")
            continue
        calls[name] = partial(run, pull_back, ct)
        off = ", ".join(f"{float(x):.1e}" for x in errors(found, true))
        same = [bool((a == b).all()) for a, b in zip(found, again, strict=True)]
        stats = run.memory_analysis()
        room = stats.temp_size_in_bytes / 1e6 if stats else float("nan")
        print(f"{name}: {room:.0f} MB, errors {off}, same bits {same}", flush=True)
        del found, again
    del true
    rounds = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    for name in calls:
        print(f"{name}: {median(times[name] for times in rounds):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
