"""What a call costs before any arithmetic: microseconds on arrays too small to take time.

`python benchmarks/dispatch.py`. Op by op, a call traces its mods and finds its compiled program by
them; under `jax.jit` it costs what any call of a compiled program does. Beside it, what `jax.numpy`
and `jax.nn` cost.
"""

import os
import platform
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from xform import causal, flex_attention


def microseconds(f, *args) -> float:
    """The median of many calls, each waited for."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[20:])


def alibi(q, slopes):
    """A closure made afresh in every call, as a layer makes it."""
    score = lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx)
    return flex_attention(q, q, q, score_mod=score, mask_mod=causal())


def main() -> None:
    q, slopes = jax.random.normal(jax.random.key(0), (1, 8, 2, 8)), jnp.ones(2)
    calls = {
        "jnp.add": (jnp.add, q, q),
        "jnp.einsum": (lambda q: jnp.einsum("bthd,bshd->bhts", q, q), q),
        "jax.nn.dot_product_attention": (jax.nn.dot_product_attention, q, q, q),
        "flex_attention": (flex_attention, q, q, q),
        "flex_attention, causal": (lambda q: flex_attention(q, q, q, mask_mod=causal()), q),
        "flex_attention, causal, ALiBi": (alibi, q, slopes),
    }
    print("$ python benchmarks/dispatch.py")
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {os.cpu_count()} cores\n")
    print(f"{'microseconds a call':32s} {'op by op':>10s} {'jax.jit':>10s}")
    for name, (f, *args) in calls.items():
        print(f"{name:32s} {microseconds(f, *args):10.0f} {microseconds(jax.jit(f), *args):10.0f}")


if __name__ == "__main__":
    main()
