"""What a device can do at best, and how near a program comes to it.

A roofline (Williams, Waterman and Patterson, doi:10.1145/1498765.1498785) bounds the time of each
line of a program from below by its FLOPs, its memory traffic and its communication. MFU and HFU
(Chowdhery et al., arXiv:2204.02311, appendix B) are the share of a device's peak that a measured
time used: of the model's own FLOPs, or of all that ran.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xform._amount import number
from xform._cost import Cost, Costs


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

    def seconds(self, matrix: Mapping[str, float]) -> float:
        """The least time of matrix products, FLOPs by kind.

        Raises:
          ValueError: if no peak is known for a kind.
        """
        if missing := sorted(kind for kind, n in matrix.items() if n and kind not in self.peak):
            raise ValueError(
                f"no peak is known of {self.name} for products of {', '.join(missing)}; known are "
                f"{', '.join(self.peak)}. Say it: `dataclasses.replace(device, peak={{…}})`."
            )
        return sum(float(n) / self.peak[kind] for kind, n in matrix.items() if n)


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

    def best(f, *args) -> float:
        f(*args).block_until_ready()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            f(*args).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    x = jax.random.normal(jax.random.key(0), (size, size))
    long = jnp.ones(2**25)
    flops = 2 * size**3 / best(jax.jit(lambda x: x @ x), x)
    bandwidth = 2 * long.nbytes / best(jax.jit(lambda x: x + 1), long)
    kinds = dict.fromkeys(("float32", "float32@highest", "bfloat16", "float16", "int8"), flops)
    return Device(
        "cpu", {**kinds, "float64": flops / 2, "complex64": flops}, bandwidth, math.inf, bandwidth,
        "measured here: a float32 product of two 1024 × 1024 matrices, and x + 1 on 128 MiB",
    )  # fmt: skip


class Utilisation(float):
    """A share of a device's peak, which says what was counted.

    Attributes:
      name: "MFU" or "HFU".
      convention: what was counted, and against what.
    """

    name: str
    convention: str

    def __new__(cls, value: float, name: str, convention: str):
        self = super().__new__(cls, value)
        self.name, self.convention = name, convention
        return self

    def __repr__(self) -> str:
        return f"{self.name} {float(self):.1%} ({self.convention})"

    __str__ = __repr__


def mfu(
    costs: Costs, seconds: float, device: Device | str | None = None, *, devices: int | None = None
) -> Utilisation:
    """Returns the model-FLOPs utilisation of a program that took so long.

    It counts the FLOPs of the model alone: matrix products, without what remat computes again;
      causal
    attention by half, whatever else its mask hides; a backward pass as twice the forward.

    Args:
      costs: of the program.
      seconds: how long one call took.
      device: what it ran on; by default what JAX runs on.
      devices: how many; by default those that the program spreads over.

    Raises:
      ValueError: if that is more than the device can do.

    >>> from xform import cost
    >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> mfu(cost(lambda x: x @ x)(x), 200e-6, "H200")
    MFU 69.5% (model FLOPs: products, no recompute, causal attention half; of H200's dense peak)
    """
    what = "model FLOPs: products, no recompute, causal attention half"
    return _utilisation("MFU", costs.model, what, costs, seconds, device, devices)


def hfu(
    costs: Costs, seconds: float, device: Device | str | None = None, *, devices: int | None = None
) -> Utilisation:
    """Returns the hardware-FLOPs utilisation: of all products that ran, recompute included.

    Attention counts the tiles that its mask leaves. Arguments and errors are those of `mfu`.
    """
    what = "executed FLOPs: products with recompute, attention by tiles that run"
    return _utilisation("HFU", costs.total.matrix, what, costs, seconds, device, devices)


def _utilisation(name, matrix, what, costs: Costs, seconds, on, devices) -> Utilisation:
    on = _as_device(on)
    devices = devices or costs.devices
    share = on.seconds(matrix) / devices / seconds
    if share > 1:
        raise ValueError(
            f"{name} would be {share:.0%}: {number(round(sum(map(float, matrix.values()))))}FLOP "
            f"in {seconds:.3g} s on {devices} × {on.name} are more than it can do. Check that "
            "`seconds` covers the whole call (`jax.block_until_ready`), that the device is the "
            "right one, and `devices`."
        )
    return Utilisation(share, name, f"{what}; of {on.name}'s dense peak")


def _as_device(x: Device | str | None) -> Device:
    return x if isinstance(x, Device) else device(x)


@dataclass(frozen=True)
class Bound:
    """The least time of one line of a program on one device.

    Attributes:
      line: the user's, or "total".
      cost: what it does there.
      compute, memory, network: seconds of its FLOPs, its bytes (perfectly fused) and its messages.
    """

    line: str
    cost: Cost
    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        """The least time, where nothing but the slowest of the three is waited for."""
        return max(self.compute, self.memory, self.network)

    @property
    def by(self) -> str:
        """What bounds it: "compute", "memory" or "network"."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        moved = float(self.cost.fused_bytes)
        return float(self.cost.flops) / moved if moved else math.inf


@dataclass(frozen=True)
class Roofline:
    """What `roofline` returns.

    Attributes:
      device: what it is about.
      lines: the bound of each line, the slowest first.
    """

    device: Device
    lines: tuple[Bound, ...]

    @property
    def seconds(self) -> float:
        """The least time of a program whose lines run one after the other."""
        return sum(b.seconds for b in self.lines)

    def __str__(self) -> str:
        head = f"at least {self.seconds:.3g} s on {self.device.name} ({self.device.source})"
        rows = [
            f"{b.seconds:9.2e} s  {b.by:7}  {b.intensity:8.1f} FLOP/B  {b.line}"
            for b in self.lines[:12]
        ]
        return "\n".join([head, *rows])


def roofline(costs: Costs, device: Device | str | None = None) -> Roofline:
    """Returns the least time of each line of a program, and what bounds it.

    Args:
      costs: of the program, without unknown trip counts; spread evenly over its devices.
      device: a `Device`, the name of one ("H200"), or None for what JAX runs on.

    Raises:
      ValueError: if a trip count is unknown, or the peak of what is multiplied.

    >>> from xform import cost
    >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    >>> roofline(cost(lambda x: x @ x)(x), "H200").lines[0].by
    'compute'
    """
    on = _as_device(device)
    vector = on.peak["float32@highest"]

    def bound(line: str, c: Cost) -> Bound:
        pointwise = float(c.other + c.transcendentals) / vector
        network = sum(map(float, c.collective_bytes.values()))
        compute = on.seconds({k: float(n) for k, n in c.matrix.items()}) + pointwise
        return Bound(line, c, compute, float(c.fused_bytes) / on.bandwidth, network / on.network)

    bounds = [bound(line, c) for line, c in costs.by_line(per_device=True).items()]
    return Roofline(on, tuple(sorted(bounds, key=lambda b: -b.seconds)))
