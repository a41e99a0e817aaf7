"""What devices can do at best: numbers of their makers, each with its source; a CPU is measured."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# XLA's names of what is multiplied.
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "s8": "int8",
    "u8": "int8",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class Device:
    """What one device can do at best.

    Attributes:
      name: such as "H200".
      peak: FLOP/s of dense matrix products by what is multiplied; "float32" as JAX multiplies it by
        default (TF32 on NVIDIA, bfloat16 on a TPU), "float32@highest" in full.
      bandwidth: bytes/s to and from its memory.
      memory: its bytes.
      network: bytes/s that it sends to its neighbours.
      source: where the numbers are from.
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    memory: float
    network: float
    source: str

    def seconds(self, matrix: Mapping[str, Any]) -> float:
        """The least time of matrix products, FLOPs by kind.

        Raises:
          ValueError: if no peak is known for a kind.
        """
        if missing := sorted(kind for kind, n in matrix.items() if n and kind not in self.peak):
            raise ValueError(
                f"no peak is known of {self.name} for products of {', '.join(missing)}; known are "
                f"{', '.join(self.peak)}. Say it: `dataclasses.replace(device, peak={{…}})`."
            )
        return sum((float(n) / self.peak[kind] for kind, n in matrix.items() if n), 0.0)


def _nvidia(narrow: float, eight: float, tf32: float, full: float, double: float) -> dict:
    narrower = dict.fromkeys(("int8", "float8_e4m3fn", "float8_e5m2"), eight)
    return {
        "bfloat16": narrow, "float16": narrow, **narrower,
        "float32": tf32, "complex64": tf32, "float32@highest": full, "float64": double,
    }  # fmt: skip


_A100 = _nvidia(312e12, 624e12, 156e12, 19.5e12, 19.5e12)
for _kind in ("float8_e4m3fn", "float8_e5m2"):
    del _A100[_kind]

DEVICES = {
    "A100": Device(
        "A100", _A100, 2.039e12, 80e9, 300e9,
        "NVIDIA A100 datasheet (SXM, 80 GB): dense rates; NVLink 600 GB/s, half of it each way",
    ),
    "H100": Device(
        "H100", _nvidia(989.4e12, 1978.9e12, 494.7e12, 66.9e12, 66.9e12), 3.35e12, 80e9, 450e9,
        "NVIDIA H100 datasheet (SXM): rates with sparsity halved; NVLink 900 GB/s, half each way",
    ),
    "H200": Device(
        "H200", _nvidia(989.4e12, 1978.9e12, 494.7e12, 66.9e12, 66.9e12), 4.8e12, 141e9, 450e9,
        "NVIDIA H200 datasheet (SXM): rates with sparsity halved; NVLink 900 GB/s, half each way",
    ),
    "B200": Device(
        "B200", _nvidia(2.25e15, 4.5e15, 1.125e15, 75e12, 37e12), 8e12, 180e9, 900e9,
        "NVIDIA HGX B200 datasheet, an eighth of it: rates with sparsity halved; NVLink 1.8 TB/s",
    ),
    "TPU v5p": Device(
        "TPU v5p",
        {
            **dict.fromkeys(("bfloat16", "float16", "float32"), 459e12),
            "int8": 918e12, "float32@highest": 459e12 / 6,
        },
        2.765e12, 95e9, 600e9,
        "cloud.google.com/tpu/docs/v5p: 459 TFLOP/s bf16, 918 TOP/s int8, 2,765 GB/s, 4,800 Gbit/s "
        "between chips; float32 in full is six passes in bfloat16",
    ),
}  # fmt: skip
"""Devices by name. Every rate is without sparsity."""


def device(name: str | None = None) -> Device:
    """Returns what a device can do; a CPU, or no name where JAX runs on one, is measured, once.

    Raises:
      ValueError: if the device is not known.

    >>> device("H200").bandwidth
    4800000000000.0
    """
    kind = jax.devices()[0].device_kind if name is None else name
    if kind.lower() == "cpu":
        return _measured_cpu()
    squeezed = lambda s: s.replace(" ", "").lower()
    for known in sorted(DEVICES, key=len, reverse=True):
        if squeezed(known) in squeezed(kind):
            return DEVICES[known]
    raise ValueError(
        f"`device` knows {', '.join(DEVICES)} and cpu; found {kind!r}. Make one: `xform.Device(…)`."
    )


@functools.cache
def _measured_cpu(size: int = 1024) -> Device:
    """This CPU: a float32 product of all cores, and a copy larger than its caches."""

    def best(f, x, *, in_place: bool = False) -> float:
        """The shortest of some runs, of which the first does not count; it compiles."""
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            y = f(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
            x = y if in_place else x
        return min(seconds[1:])

    x = jax.random.normal(jax.random.key(0), (size, size))
    flops = 2 * size**3 / best(jax.jit(lambda x: x @ x), x)
    # In place: the first touch of each page of a new array takes several times as long.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    bandwidth = 2 * 2**27 / best(add, jnp.ones(2**25), in_place=True)
    kinds = dict.fromkeys(("float32", "float32@highest", "bfloat16", "float16", "int8"), flops)
    return Device(
        "cpu", {**kinds, "float64": flops / 2, "complex64": flops}, bandwidth, math.inf, bandwidth,
        "measured here: a float32 product of two 1024 × 1024 matrices, x + 1 in place on 128 MiB",
    )  # fmt: skip
