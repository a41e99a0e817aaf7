"""What stands between a model's matrix products, on one GPU: `fuse` beside XLA and torch.compile.

    python3 benchmarks/fuse_gpu.py                 # torch.compile is in it where torch is installed
    python3 benchmarks/fuse_gpu.py --rows 64 --width 256       # on a CPU: that it runs, no more

One process, one table; peers take turns, so that all meet the same clock and heat. A time is what
one more call in flight costs, (time of 30 calls - time of 10) / 20, the median over rounds: what
starting and waiting cost is in both, and drops out. AdamW's step goes over the memory of what it
changes, with moments in the parameters' dtype. GB/s counts the arrays of [N, D] that must be
read and written once. The roof is the fastest of three copies of as many bytes: `-x` by XLA, by
`fuse`, and torch's `copy_`. The gradient of a residual is that of what it is added to, and is asked
for once; angles of rotary embedding are constants, as in a model.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from xform import fuse  # noqa: E402

ROUNDS, FEW, MANY = 9, 10, 30


class Subject(NamedTuple):
    """A function in JAX and in torch.

    Attributes:
      f: of arrays.
      shapes: of its arguments, of N rows of D.
      torch: the same of torch's tensors, given torch.
      moving: the arguments that have a gradient.
      passed: how many arrays of [N, D] must pass through memory, forward and backward.
    """

    f: Callable
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    torch: Callable[[Any], Callable]
    moving: tuple[int, ...]
    passed: tuple[int, int]


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
    "RMSNorm + residual": Subject(
        rms_norm, lambda n, d: [(n, d), (n, d), (d,)], rms_norm_torch, (0, 2), (4, 4)
    ),
    "softmax": Subject(
        softmax, lambda n, d: [(n, d)],
        lambda torch: lambda x: torch.softmax(x.float(), -1).to(x.dtype), (0,), (2, 3),
    ),
    "SwiGLU": Subject(
        swiglu, lambda n, d: [(n, d)] * 2,
        lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up, (0, 1), (3, 5),
    ),
    "rotary": Subject(
        rotary, lambda n, d: [(n, d // HEAD, HEAD), (n, HEAD // 2), (n, HEAD // 2)], rotary_torch,
        (0,), (2, 2),
    ),
}  # fmt: skip


# ---- programs ------------------------------------------------------------------------------------


def forward(f: Callable, args: list, cts: list, moving: tuple[int, ...]) -> tuple[Callable, list]:
    del cts, moving
    return f, args


def backward(f: Callable, args: list, cts: list, moving: tuple[int, ...]) -> tuple[Callable, list]:
    """The backward pass alone: its residuals are arguments."""

    def of(*found):
        full = dict(zip(moving, found, strict=True))
        return f(*(full.get(i, x) for i, x in enumerate(args)))

    outs, pull = jax.vjp(of, *(args[i] for i in moving))
    tree = jax.tree.structure(outs)
    return lambda pull, *cts: pull(jax.tree.unflatten(tree, cts)), [pull, *cts]


PROGRAMS = {"forward": forward, "backward": backward}


def arrays(subject: Subject, n: int, d: int) -> tuple[list, list]:
    """Random arguments, and cotangents of the results."""
    normal = lambda i, s: jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
    args = [normal(i, shape) for i, shape in enumerate(subject.shapes(n, d))]
    outs = jax.tree.leaves(jax.eval_shape(subject.f, *args))
    return args, [normal(9 + i, x.shape) for i, x in enumerate(outs)]


def least_bytes(subject: Subject, program: str, n: int, d: int) -> int:
    """What must pass through memory, in bfloat16."""
    return 2 * n * d * subject.passed[list(PROGRAMS).index(program)]


type Calls = Callable[[int], None]
"""Makes so many calls, and waits for all of them."""


def in_jax(f: Callable, program: str, args: list, cts: list, moving: tuple[int, ...]) -> Calls:
    g, inputs = PROGRAMS[program](f, args, cts, moving)
    compiled = jax.jit(g).lower(*inputs).compile()

    def calls(count: int) -> None:
        last = None
        for _ in range(count):
            last = compiled(*inputs)
        jax.block_until_ready(last)

    return calls


def torch_array(torch, x):
    import numpy as np

    return torch.tensor(np.asarray(x.astype(jnp.float32))).to("cuda", torch.bfloat16)


def in_torch(subject: Subject, program: str, args: list, cts: list) -> Calls:
    """By torch.compile; raises ImportError where torch is not installed."""
    import torch  # pyright: ignore[reportMissingImports]

    torch._dynamo.reset()
    f = torch.compile(subject.torch(torch))
    leaves = [torch_array(torch, x) for x in args]
    if program == "forward":
        run = lambda: f(*leaves)
    else:
        moving = [leaves[i].requires_grad_() for i in subject.moving]
        outs = f(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        given = [torch_array(torch, x) for x in cts]
        run = lambda: torch.autograd.grad(outs, moving, given, retain_graph=True)

    def calls(count: int) -> None:
        for _ in range(count):
            run()
        torch.cuda.synchronize()

    return calls


def adamw(param, mean, square, grad, step):
    """One step, in float32, of parameters and moments of one dtype."""
    g = grad.astype(jnp.float32)
    m = 0.9 * mean.astype(jnp.float32) + 0.1 * g
    v = 0.98 * square.astype(jnp.float32) + 0.02 * g * g
    moved = m / (jnp.sqrt(v) + 1e-8) + 0.1 * param.astype(jnp.float32)
    new = param.astype(jnp.float32) - step * moved, m, v
    return tuple(x.astype(param.dtype) for x in new)


def updates(f: Callable, state: Sequence[jax.Array]) -> Calls:
    """Steps of AdamW, each over the memory of the one before."""
    run, step = jax.jit(f, donate_argnums=(0, 1, 2)), jnp.float32(1e-4)
    *own, grad = (x.copy() for x in state)

    def calls(count: int) -> None:
        for _ in range(count):
            own[:] = run(*own, grad, step)
        jax.block_until_ready(own)

    return calls


def updates_in_torch(state: Sequence[jax.Array]) -> Calls:
    """By torch's own fused kernel."""
    import torch  # pyright: ignore[reportMissingImports]

    param, grad = (torch_array(torch, x) for x in (state[0], state[-1]))
    param.grad = grad
    optimizer = torch.optim.AdamW([param], lr=1e-4, fused=True)

    def calls(count: int) -> None:
        for _ in range(count):
            optimizer.step()
        torch.cuda.synchronize()

    return calls


def numbers(count: int) -> jax.Array:
    """Half of so many bytes: to read and to write."""
    return jax.random.normal(jax.random.key(0), (count // 4,), jnp.bfloat16)


def copy_in_jax(f: Callable, count: int) -> Calls:
    return in_jax(f, "forward", [numbers(count)], [], ())


def copy_in_torch(count: int) -> Calls:
    import torch  # pyright: ignore[reportMissingImports]

    x = torch_array(torch, numbers(count))
    y = torch.empty_like(x)

    def calls(count: int) -> None:
        for _ in range(count):
            y.copy_(x)
        torch.cuda.synchronize()

    return calls


# ---- the table -----------------------------------------------------------------------------------


COPIES = {
    "copy, XLA": partial(copy_in_jax, jnp.negative),
    "copy, fuse": partial(copy_in_jax, fuse(jnp.negative)),
    "copy, torch": copy_in_torch,
}
"""Ways to move bytes; the fastest is the roof."""


def peers(subject: Subject, program: str, args: list, cts: list, count: int) -> dict[str, Callable]:
    """How each peer's calls are made, and copies of so many bytes."""
    rest = (program, args, cts, subject.moving)
    return {
        **{name: partial(copy, count) for name, copy in COPIES.items()},
        "fuse": partial(in_jax, fuse(subject.f), *rest),
        "XLA": partial(in_jax, subject.f, *rest),
        "torch.compile": partial(in_torch, subject, program, args, cts),
    }


def prepare(make: Callable) -> Calls | str:
    """Calls that have run once, or why there are none."""
    try:
        calls = make()
        calls(3)
    except ImportError as e:
        return f"not installed ({e})"
    except Exception as e:  # a peer's own limit is a finding, not the end of the table
        return f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"
    return calls


def milliseconds(calls: Calls) -> float:
    """Of one call more."""

    def taken(count: int) -> float:
        start = time.perf_counter()
        calls(count)
        return time.perf_counter() - start

    few = taken(FEW)
    return 1e3 * (taken(MANY) - few) / (MANY - FEW)


def measure(name: str, program: str, n: int, d: int) -> None:
    """Prints the rows of one subject."""
    subject = SUBJECTS[name]
    args, cts = arrays(subject, n, d)
    count = least_bytes(subject, program, n, d)
    compare(name, program, count, peers(subject, program, args, cts, count))


def measure_updates(n: int, d: int) -> None:
    """Prints the rows of AdamW, which reads four arrays and writes three."""
    state = [jax.random.normal(jax.random.key(i), (n, d), jnp.bfloat16) for i in range(4)]
    state[2] = jnp.square(state[2])
    count = 7 * state[0].nbytes
    made = {
        **{name: partial(copy, count) for name, copy in COPIES.items()},
        "fuse": partial(updates, fuse(adamw, donate_argnums=(0, 1, 2)), state),
        "XLA": partial(updates, adamw, state),
        "torch, fused": partial(updates_in_torch, state),
    }
    compare("AdamW", "a step", count, made)


def compare(name: str, program: str, count: int, made: dict[str, Callable]) -> None:
    """Prints a row for each peer, which takes turns with the others."""
    ready = {peer: prepare(make) for peer, make in made.items()}
    calls = {peer: call for peer, call in ready.items() if not isinstance(call, str)}
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    for i in range(ROUNDS):
        for peer in list(calls)[:: -1 if i % 2 else 1]:
            times[peer].append(milliseconds(calls[peer]))
    roof = min((median(times[peer]) for peer in COPIES if peer in times), default=math.nan)
    for peer, call in ready.items():
        head = f"{name:20}{program:10}{peer:15}"
        if isinstance(call, str):
            print(f"{head}{call}", flush=True)
            continue
        ms = median(times[peer])
        print(f"{head}{ms:9.3f}{count / ms / 1e6:9,.0f}{roof / ms:8.1%}", flush=True)


def heading() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"$ python3 {' '.join(['benchmarks/fuse_gpu.py', *sys.argv[1:]])}\n"
        f"{jax.devices()[0].device_kind}; Python {platform.python_version()}, "
        f"jax {jax.__version__}, commit {commit or 'unknown'}\n"
        f"bfloat16; median of {ROUNDS} rounds; of the roof: of the fastest copy's speed\n"
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
    measure_updates(options.rows, options.width)


if __name__ == "__main__":
    main()
