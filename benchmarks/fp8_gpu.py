"""Matrix products in 8 bits beside bfloat16, on one GPU: what `xform.precision` makes of them.

    python3 benchmarks/fp8_gpu.py
    python3 benchmarks/fp8_gpu.py --size 4096

One process, one table. Rows take turns, so that all meet the same clock and heat; a time is the
median over rounds of some calls in flight, which is the time of the device. Operands are normal
random numbers in bfloat16, as activations are. A row's time holds all that it does: its maxima, its
rounding to 8 bits, and its scales. "The product alone" begins with elements that are in 8 bits
already. Errors are root mean squares against the product of the bfloat16 numbers in float32,
relative to the result's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from xform import POLICIES, native, precision, quantise  # noqa: E402
from xform._precision._products import Options, product  # noqa: E402
from xform.primitives.scaled_product import by_kernel, scaled_product  # noqa: E402

ROUNDS, CALLS = 9, 10
DIMS = (((1,), (0,)), ((), ()))
MARKS = {"scaled_product": "our kernel", "matmul$f8": "cublasLt f8", "triton": "Triton"}
"""How a program's text tells what multiplies."""


def in_policy(name: str) -> Callable:
    """The product that a policy makes of two activations."""
    products: Any = POLICIES[name].products
    options = Options(DIMS, products, jnp.dtype(jnp.bfloat16))
    return lambda x, y, state: product(x, y, state, options)


def bf16(x, y, state):
    return lax.dot_general(x, y, DIMS, preferred_element_type=jnp.bfloat16)


def elements(x, y, scale):
    """The product alone: elements and scales are there, numbers to sum over last."""
    if by_kernel(x, y, jnp.bfloat16):
        return scaled_product(x, y, scale, jnp.bfloat16)
    return elements_by_xla(x, y, scale)


def elements_by_xla(x, y, scale):
    """The same by XLA."""
    last = (((1,), (1,)), ((), ()))
    out = lax.dot_general(x, y, last, preferred_element_type=jnp.float32)
    return (out * scale).astype(jnp.bfloat16)


def both_passes(f: Callable) -> Callable:
    """A product, and the two of its backward pass."""

    def run(x, y, state):
        out, pull = jax.vjp(lambda x, y: f(x, y, state), x, y)
        return out, pull(out)

    return run


def rows(size: int) -> dict[str, tuple[Callable, tuple]]:
    """Of each row the function and its arguments."""
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    state = jnp.full((3, 16), 6.0)
    qx, qy = quantise(x, "e4m3"), quantise(y, "e4m3")
    alone = qx.elements, qy.elements.T, qx.scale * qy.scale
    wide = y.astype(jnp.float32)
    # A weight in float32, and an activation that is a product's result, as inside of a model.
    layer = lambda name: lambda x, y: precision(lambda x, y: x @ y, name)(x, y)
    return {
        "bf16": (bf16, (x, y, state)),
        "fp8, scales of today": (in_policy("fp8"), (x, y, state)),
        "fp8, delayed scales": (in_policy("fp8_delayed"), (x, y, state)),
        "fp8, the product alone": (elements, alone),
        "fp8, the product alone, by XLA": (elements_by_xla, alone),
        "bf16, three products": (both_passes(bf16), (x, y, state)),
        "fp8, three products": (both_passes(in_policy("fp8")), (x, y, state)),
        "fp8 delayed, three products": (both_passes(in_policy("fp8_delayed")), (x, y, state)),
        "bf16 policy, float32 operands": (layer("bf16"), (x.astype(jnp.float32), wide)),
        "fp8 policy, float32 operands": (layer("fp8"), (x.astype(jnp.float32), wide)),
    }


def seconds(run: Callable, args: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(CALLS)])
    return (time.perf_counter() - start) / CALLS


def error(out: Any, x: jax.Array, y: jax.Array) -> float:
    """Of the first rows."""
    out = jax.tree.leaves(out)[0][:64].astype(jnp.float32)
    exact = jnp.matmul(x[:64].astype(jnp.float32), y.astype(jnp.float32), precision="highest")
    return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=8192)
    size = parser.parse_args().size
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {size}³; e4m3 is {native('e4m3').why}")
    table = rows(size)
    runs = {name: jax.jit(f).lower(*args).compile() for name, (f, args) in table.items()}
    x, y = table["bf16"][1][:2]
    errors = {}
    for name, (_, args) in table.items():
        errors[name] = error(runs[name](*args), x, y)
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(ROUNDS):
        for name, (_, args) in table.items():
            times[name].append(seconds(runs[name], args))
    print(f"\n| {'product':30} |      ms | TFLOP/s | × bf16 |   error | as |\n|{'---|' * 6}")
    for name, found in times.items():
        base = "bf16"
        base = "bf16, three products" if "three" in name else base
        base = "bf16 policy, float32 operands" if "operands" in name else base
        ms, flops = 1e3 * median(found), 2 * size**3 * (3 if "three" in name else 1)
        text: str = runs[name].as_text() or ""
        how = next((how for mark, how in MARKS.items() if mark in text), "")
        print(
            f"| {name:30} | {ms:7.3f} | {flops / ms / 1e9:7.0f} "
            f"| {median(times[base]) / median(found):6.2f} | {errors[name]:.1e} | {how} |"
        )


if __name__ == "__main__":
    main()
