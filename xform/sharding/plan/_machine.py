"""What it is trained on: devices, what share of their best they keep up, and what joins them.

A product, a kernel or a message never runs at the rate of a data sheet. Each share below is one
number for a kind of device, with where it was measured; none belongs to a row of a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from xform._devices import Device, device
from xform.sharding.pipeline._times import Real


@dataclass(frozen=True)
class Rates:
    """What a kind of device keeps up, as shares of what `Device` says it can do at best.

    Attributes:
      product: of large matrix products, while everything is hot.
      fill: length of the inner dim at which a product is at half of that, for what it takes to
        begin and to end a tile.
      attention: of the fused kernel, forward and backward, of the pairs that a causal mask leaves.
      stream: of memory bandwidth, for what is computed element by element.
      link: of what devices of a node can send each other.
      network: of what a device can send out of its node.
      launch: seconds between two kernels.
      units: streaming multiprocessors; a product's tiles are dealt out to them.
      source: where these are from.
    """

    product: Real
    fill: Real
    attention: tuple[Real, Real]
    stream: Real
    link: Real
    network: Real
    launch: Real
    units: int
    source: str


RATES = {
    "A100": Rates(
        0.91, 200, (0.55, 0.45), 0.85, 0.78, 0.90, 1.5e-6, 108,
        "products: fitted to GPT-3 175B of arXiv 2205.05198, table 5, with selective recompute; "
        "attention: arXiv 2307.08691, figures 4 and 6; links: nccl-tests, 235 of 300 GB/s on a "
        "node of eight",
    ),
    "H100": Rates(
        0.598, 90, (0.55, 0.52), 0.85, 0.80, 0.85, 1.5e-6, 132,
        "products: fitted to Llama 3 405B on 8,192 GPUs (arXiv 2407.21783, table 4); attention: "
        "cuDNN's at 16k causal on an H200, benchmarks/RESULTS.md; links: nccl-tests, 360 of "
        "450 GB/s on a node of eight",
    ),
    "H200": Rates(
        0.70, 90, (0.55, 0.40), 0.83, 0.40, 0.85, 1.5e-6, 132,
        "benchmarks/plan_gpu.py (benchmarks/RESULTS.md): products of twelve shapes; attention at "
        "8k causal, grouped, one order of addition; links: 182 GB/s of an all-gather of 128 MiB "
        "between two GPUs, which is less than eight would have",
    ),
}  # fmt: skip
"""By the name of the device."""


@dataclass(frozen=True)
class Fabric:
    """What joins devices.

    Attributes:
      node: devices that NVLink joins.
      nic: bytes/s of a device's own port out of the node, each way (rail-optimised: each has one).
      pod: devices within which all ports have their full rate; None where all have.
      oversubscription: how many times more the ports of a pod are than its way out.
      link_hop, network_hop: seconds of one step of a collective, in a node and between nodes.
      source: where these are from.
    """

    node: int = 8
    nic: Real = 50e9
    pod: int | None = None
    oversubscription: Real = 1.0
    link_hop: Real = 2e-6
    network_hop: Real = 8e-6
    source: str = "400 Gb/s a device, no oversubscription"


FABRICS = {
    "A100": Fabric(
        nic=25e9, source="eight ports of 200 Gb/s a node, a full fat tree (arXiv 2104.04473)"
    ),
    "H100": Fabric(
        pod=3072, oversubscription=7.0,
        source="400 Gb/s a device; 1 to 7 between pods of 3,072 (arXiv 2407.21783, section 3.3.1)",
    ),
    "H200": Fabric(),
}  # fmt: skip
"""By the name of the device; others get `Fabric()`."""


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, and what joins them; see `machine`.

    Attributes:
      device: what one of them can do at best.
      count: how many.
      rates: what they keep up.
      fabric: what joins them.
      usable: share of a device's memory that a program may have; the rest is the context's,
        libraries' and fragments.
    """

    device: Device
    count: int
    rates: Rates = field(repr=False)
    fabric: Fabric = field(repr=False)
    usable: Real = 0.94

    @property
    def memory(self) -> Real:
        """Bytes of a device that a program may have."""
        return self.device.memory * self.usable

    def peak(self, dtype: str = "bfloat16") -> Real:
        """FLOP/s of one device at best."""
        return self.device.peak[dtype]


def machine(
    kind: str | Device,
    count: int,
    *,
    rates: Rates | None = None,
    fabric: Fabric | None = None,
    **changes: Real | int | str | None,
) -> Machine:
    """Returns so many devices of a kind.

    Args:
      kind: "A100", "H100", "H200", or a `Device`, with `rates` unless they are known.
      count: how many.
      rates: what they keep up; by default what is known of the kind.
      fabric: what joins them; by default `FABRICS`.
      **changes: attributes of `Rates` or `Fabric` to change, such as `nic=25e9`.

    Raises:
      ValueError: unknown kinds and names, and numbers out of range, all at once.

    >>> machine("H100", 16384, nic=25e9).fabric.nic
    25000000000.0
    """
    on = kind if isinstance(kind, Device) else device(kind)
    wrong = [] if count >= 1 else [f"count={count} must be at least 1"]
    rates = rates or RATES.get(on.name)
    if rates is None:
        known = ", ".join(RATES)
        wrong.append(f"no rates are known of {on.name}, only of {known}: give `rates=Rates(…)`")
    fabric = fabric or FABRICS.get(on.name, Fabric())
    of_rates = {k: v for k, v in changes.items() if k in Rates.__dataclass_fields__}
    of_fabric = {k: v for k, v in changes.items() if k in Fabric.__dataclass_fields__}
    if unknown := sorted(changes.keys() - of_rates.keys() - of_fabric.keys()):
        wrong.append(f"neither `Rates` nor `Fabric` has {', '.join(unknown)}")
    if rates is not None:
        rates = replace(rates, **of_rates)  # pyright: ignore[reportArgumentType]
        wrong += _out_of_range(rates)
    fabric = replace(fabric, **of_fabric)  # pyright: ignore[reportArgumentType]
    if fabric.node < 1 or not fabric.nic > 0 or fabric.oversubscription < 1:
        wrong.append(f"{fabric} must have a node and a nic above 0, and oversubscription from 1 on")
    if wrong:
        raise ValueError(f"`machine`: {'; '.join(wrong)}.")
    assert rates is not None
    return Machine(on, count, rates, fabric)


def _out_of_range(rates: Rates) -> list[str]:
    shares = {name: getattr(rates, name) for name in ("product", "stream", "link", "network")}
    shares |= dict(zip(("attention forward", "backward"), rates.attention, strict=True))
    wrong = [f"{name}={x} must be a share above 0, up to 1" for name, x in shares.items()
             if not 0 < x <= 1]  # fmt: skip
    if not 0 <= rates.launch < math.inf or rates.fill < 0 or rates.units < 1:
        wrong.append("launch and fill may not be negative, and units must be above 0")
    return wrong
