"""What stands between a model's matrix products, on one GPU: `fuse` beside XLA and torch.compile.

    python3 benchmarks/fuse_gpu.py                 # torch.compile is in it where torch is installed
    python3 benchmarks/fuse_gpu.py --rows 64 --width 256       # on a CPU: that it runs, no more

One process, one table; peers take turns, so that all meet the same clock and heat. A time is the
median over rounds of some calls in flight. GB/s counts what must be read and written once:
arguments and results, and of a backward pass the arguments, cotangents and gradients. The row
"copy" is `-x` by XLA, which moves as many bytes: the roof of all.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from xform import fuse  # noqa: E402

ROUNDS, CALLS = 7, 10


class Subject(NamedTuple):
    """A function in JAX and in torch.

    Attributes:
      f: of arrays.
      shapes: of its arguments, of N rows of D.
      torch: the same of torch's tensors, given torch.
    """

    f: Callable
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    torch: Callable[[Any], Callable]


def rms_norm(x, residual, weight):
    h = x + residual
    wide = h.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weight[None], h


def rms_norm_torch(torch):
    def f(x, residual, weight):
        h = x + residual
        wide = h.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * weight, h

    return f


def softmax(x):
    wide = x.astype(jnp.float32)
    return jax.nn.softmax(wide, axis=-1).astype(x.dtype)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def rotary(x, cos, sin):
    """`x` is `[T,H,D]`, with angles `[T,D/2]`."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotary_torch(torch):
    def f(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return f


HEAD = 128
"""The size of a head, of which rotary embedding takes D / HEAD."""

SUBJECTS = {
    "RMSNorm + residual": Subject(rms_norm, lambda n, d: [(n, d), (n, d), (d,)], rms_norm_torch),
    "softmax": Subject(
        softmax, lambda n, d: [(n, d)],
        lambda torch: lambda x: torch.softmax(x.float(), -1).to(x.dtype),
    ),
    "SwiGLU": Subject(
        swiglu, lambda n, d: [(n, d)] * 2,
        lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
    ),
    "rotary": Subject(
        rotary, lambda n, d: [(n, d // HEAD, HEAD), (n, HEAD // 2), (n, HEAD // 2)], rotary_torch
    ),
}  # fmt: skip


# ---- programs ------------------------------------------------------------------------------------


def forward(f: Callable, args: list, cts: list) -> tuple[Callable, list]:
    del cts
    return f, args


def backward(f: Callable, args: list, cts: list) -> tuple[Callable, list]:
    """The backward pass alone: its residuals are arguments."""
    outs, pull = jax.vjp(f, *args)
    tree = jax.tree.structure(outs)
    return lambda pull, *cts: pull(jax.tree.unflatten(tree, cts)), [pull, *cts]


PROGRAMS = {"forward": forward, "backward": backward}


def arrays(subject: Subject, n: int, d: int) -> tuple[list, list]:
    """Random arguments, and cotangents of the results."""
    normal = lambda i, s: jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
    args = [normal(i, shape) for i, shape in enumerate(subject.shapes(n, d))]
    outs = jax.tree.leaves(jax.eval_shape(subject.f, *args))
    return args, [normal(9 + i, x.shape) for i, x in enumerate(outs)]


def least_bytes(program: str, args: list, cts: list) -> int:
    """What must pass through memory."""
    size = lambda xs: sum(x.nbytes for x in xs)
    return size(args) + size(cts) if program == "forward" else 2 * size(args) + size(cts)


def in_jax(f: Callable, program: str, args: list, cts: list) -> Callable:
    g, inputs = PROGRAMS[program](f, args, cts)
    compiled = jax.jit(g).lower(*inputs).compile()
    return lambda: jax.block_until_ready([compiled(*inputs) for _ in range(CALLS)])


def in_torch(subject: Subject, program: str, args: list, cts: list) -> Callable:
    """By torch.compile; raises ImportError where torch is not installed."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    put = lambda x: torch.tensor(np.asarray(x.astype(jnp.float32))).to("cuda", torch.bfloat16)
    torch._dynamo.reset()
    f = torch.compile(subject.torch(torch))
    leaves = [put(x).requires_grad_(program == "backward") for x in args]
    if program == "forward":
        run = lambda: f(*leaves)
    else:
        outs = f(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        given = [put(x) for x in cts]
        run = lambda: torch.autograd.grad(outs, leaves, given, retain_graph=True)

    def call():
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()

    return call


def copy(count: int) -> Callable:
    """Reads and writes so many bytes together."""
    x = jax.random.normal(jax.random.key(0), (count // 4,), jnp.bfloat16)
    compiled = jax.jit(lambda x: -x).lower(x).compile()
    return lambda: jax.block_until_ready([compiled(x) for _ in range(CALLS)])


# ---- the table -----------------------------------------------------------------------------------


def peers(subject: Subject, program: str, args: list, cts: list) -> dict[str, Callable]:
    """How each peer's call is made."""
    return {
        "copy": partial(copy, least_bytes(program, args, cts)),
        "fuse": partial(in_jax, fuse(subject.f), program, args, cts),
        "XLA": partial(in_jax, subject.f, program, args, cts),
        "torch.compile": partial(in_torch, subject, program, args, cts),
    }


def prepare(make: Callable) -> Callable | str:
    """A call that has run once, or why there is none."""
    try:
        call = make()
        call()
    except ImportError as e:
        return f"not installed ({e})"
    except Exception as e:  # a peer's own limit is a finding, not the end of the table
        return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"
    return call


def milliseconds(call: Callable) -> float:
    """Of one of the calls in flight."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start) / CALLS


def measure(name: str, program: str, n: int, d: int) -> None:
    """Prints the rows of one subject."""
    subject = SUBJECTS[name]
    args, cts = arrays(subject, n, d)
    ready = {peer: prepare(make) for peer, make in peers(subject, program, args, cts).items()}
    calls = {peer: call for peer, call in ready.items() if not isinstance(call, str)}
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    for i in range(ROUNDS):
        for peer in list(calls)[:: -1 if i % 2 else 1]:
            times[peer].append(milliseconds(calls[peer]))
    count = least_bytes(program, args, cts)
    for peer, call in ready.items():
        head = f"{name:20}{program:10}{peer:15}"
        if isinstance(call, str):
            print(f"{head}{call}", flush=True)
            continue
        ms = median(times[peer])
        roof = median(times["copy"]) / ms if "copy" in times else math.nan
        print(f"{head}{ms:9.3f}{count / ms / 1e6:9,.0f}{roof:8.1%}", flush=True)


def heading() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"$ python3 {' '.join(['benchmarks/fuse_gpu.py', *sys.argv[1:]])}\n"
        f"{jax.devices()[0].device_kind}; Python {platform.python_version()}, "
        f"jax {jax.__version__}, commit {commit or 'unknown'}\n"
        f"bfloat16; median of {ROUNDS} rounds of {CALLS} calls; of the roof: of a copy's speed\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=4_096)
    options = parser.parse_args()
    print(heading())
    print(f"{'subject':20}{'program':10}{'peer':15}{'ms':>9}{'GB/s':>9}{'roof':>8}")
    for name in SUBJECTS:
        for program in PROGRAMS:
            measure(name, program, options.rows, options.width)


if __name__ == "__main__":
    main()
