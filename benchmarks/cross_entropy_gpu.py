"""Cross entropy of a language model on one GPU: xform beside XLA's dense form and tokamax's.

    python3 benchmarks/cross_entropy_gpu.py

One process, one table; tokamax is in it where it can be imported. Peers take turns, so that all
meet the same clock and heat; a time is the median over rounds of some calls in flight, which is the
time of the device. Errors are against float32 products of the same bfloat16 inputs, relative to the
largest number of a result.

MFU counts 2·T·V·D FLOPs forward and 6·T·V·D forward and backward, whatever a peer computes again.
"""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from xform import linear_cross_entropy  # noqa: E402

PEAK = 989e12
"""FLOP/s of an H200 in bfloat16, dense, by its data sheet."""
ROUNDS, CALLS = 5, 3


class Shape(NamedTuple):
    T: int
    V: int
    D: int


LARGE, MIDDLE = Shape(8192, 128256, 4096), Shape(8192, 32768, 2048)


# ---- the peers: (hidden [T,D], weight [D,V], labels [T]) -> mean loss ----------------------------


def xform(hidden, weight, labels, **options):
    return linear_cross_entropy(hidden, weight, labels, **options)[0].mean()


def dense(hidden, weight, labels, *, logits):
    """All logits at once, as one would write it; softmax in float32."""
    x = jnp.matmul(hidden, weight, preferred_element_type=logits).astype(jnp.float32)
    log_p = jax.nn.log_softmax(x)
    return -jnp.take_along_axis(log_p, labels[:, None], -1).mean()


def tokamax(implementation: str) -> Callable:
    """The loss of tokamax; raises ImportError where it is not installed."""
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):  # its own benchmarks read profiles
        module = types.ModuleType(name)
        module.__dict__.update(__path__=[], get_kernel_stats_tool=None)
        sys.modules.setdefault(name, module)
    logging.getLogger("absl").setLevel(logging.ERROR)  # it has no tuned configuration, and says so
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import (  # pyright: ignore[reportMissingImports]
        api,
    )

    def loss(hidden, weight, labels):
        return api.linear_softmax_cross_entropy_loss(
            hidden, labels, weight, reduction="mean", implementation=implementation
        )

    return loss


PEERS: dict[str, Callable[[], Callable]] = {
    "xform": lambda: xform,
    "xform, kernels": lambda: partial(xform, implementation="mosaic_gpu"),
    "xform, logits kept": lambda: partial(xform, keep_logits=True),
    "dense, bf16 logits": lambda: partial(dense, logits=jnp.bfloat16),
    "dense, f32 logits": lambda: partial(dense, logits=jnp.float32),
    "tokamax chunked_xla": partial(tokamax, "chunked_xla"),
    "tokamax xla": partial(tokamax, "xla"),
}
PROGRAMS = {
    "forward": lambda loss: loss,
    "forward+backward": lambda loss: jax.value_and_grad(loss, argnums=(0, 1)),
}


# ---- one row -------------------------------------------------------------------------------------


def inputs(shape: Shape):
    """Random inputs whose logits have unit variance, as those of a model that is not sure."""
    T, V, D = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (T, D), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (D, V), jnp.bfloat16) * jnp.bfloat16(D**-0.5)
    return hidden, weight, jax.random.randint(keys[2], (T,), 0, V)


@jax.jit
def errors(found, true):
    """The largest difference of each result, relative to its largest number."""
    wide = lambda x: x.astype(jnp.float32)
    off = lambda x, y: jnp.abs(wide(x) - wide(y)).max() / jnp.abs(wide(y)).max()
    return jax.tree.map(off, found, true)


def truth(program: Callable, args):
    """`program` of the dense loss in float32."""
    hidden, weight, labels = args
    with jax.default_matmul_precision("highest"):
        f = jax.jit(program(partial(dense, logits=jnp.float32)))
        return jax.block_until_ready(f(*(x.astype(jnp.float32) for x in (hidden, weight)), labels))


def prepare(peer: str, program: Callable, args):
    """The compiled program of a peer, or why there is none."""
    try:
        return jax.jit(program(PEERS[peer]())).lower(*args).compile()
    except ImportError as e:
        return f"not installed ({e})"
    except Exception as e:  # a peer's own limit is a finding, not the end of the table
        return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"


def milliseconds(compiled, args) -> float:
    """Of one call, with some in flight."""
    start = time.perf_counter()
    jax.block_until_ready([compiled(*args) for _ in range(CALLS)])
    return 1e3 * (time.perf_counter() - start) / CALLS


def measure(shape: Shape, name: str) -> None:
    """Prints the rows of one program on one shape."""
    args, program = jax.block_until_ready(inputs(shape)), PROGRAMS[name]
    true = truth(program, args)
    compiled = {peer: prepare(peer, program, args) for peer in PEERS}
    ready = {peer: c for peer, c in compiled.items() if not isinstance(c, str)}
    off = {peer: jax.device_get(errors(c(*args), true)) for peer, c in ready.items()}
    del true
    times: dict[str, list[float]] = {peer: [] for peer in ready}
    for i in range(ROUNDS):
        for peer in list(ready)[:: -1 if i % 2 else 1]:
            times[peer].append(milliseconds(ready[peer], args))
    flops = 2 * shape.T * shape.V * shape.D * (1 if name == "forward" else 3)
    for peer, program in compiled.items():
        head = f"{shape.T:>5} {shape.V:>7} {shape.D:>5}  {name:17}{peer:21}"
        if isinstance(program, str):
            print(f"{head}  {program}", flush=True)
            continue
        ms = median(times[peer])
        analysis = program.memory_analysis()
        memory = analysis.temp_size_in_bytes if analysis else 0
        wrong = " ".join(f"{x:.1e}" for x in jax.tree.leaves(off[peer]))
        print(
            f"{head}{ms:9.2f}{flops / ms / 1e-3 / PEAK:7.1%}{memory / 2**20:10,.0f}"
            f"{memory / (4 * shape.T * shape.V):8.1%}  {wrong}",
            flush=True,
        )


def heading() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    device = jax.devices()[0].device_kind
    return (
        f"$ python3 benchmarks/cross_entropy_gpu.py\n{device}; Python {platform.python_version()}, "
        f"jax {jax.__version__}, commit {commit or 'unknown'}\n"
        f"bfloat16; ms, median of {ROUNDS} rounds of {CALLS} calls; temporaries in MiB, and as a "
        "part of the dense float32 logits;\n"
        "off: the largest error of the loss, the hidden states' gradient, the weights' gradient\n"
    )


def main() -> None:
    if jax.default_backend() != "gpu":
        sys.exit(f"This measures a GPU; JAX found {jax.default_backend()} alone.")
    start = time.perf_counter()
    print(heading())
    columns = f"{'ms':>9}{'MFU':>7}{'MiB':>10}{'part':>8}  off"
    print(f"{'T':>5} {'V':>7} {'D':>5}  {'program':17}{'peer':21}{columns}")
    for shape, name in (
        (LARGE, "forward"),
        (LARGE, "forward+backward"),
        (MIDDLE, "forward+backward"),
    ):
        measure(shape, name)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
