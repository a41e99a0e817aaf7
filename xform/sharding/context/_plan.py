"""What each way of context parallelism costs, and which is the cheapest.

Time is that of the busiest device, one way (forward): the products of its live tiles at the share
of the peak that attention reaches, and messages at the network's rate. A ring hides its messages
behind products, step by step, where the others wait for theirs:

    ring          Σ over steps of the longer of: the busiest device's tiles, the next keys' message
    all_gather    keys and values of n - 1 devices, then the busiest device's tiles
    ulysses       (n - 1)/n of queries, keys, values and output, then 1/n of all tiles
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import jax
import numpy as np

from xform._devices import DEVICES, Device
from xform.sharding.context._tiles import Load, by_device, tiles_by_chunk
from xform.sharding.context.layouts import Layout, contiguous

type Method = Literal["ring", "all_gather", "ulysses"]
METHODS: tuple[Method, ...] = ("ring", "all_gather", "ulysses")

# Of the peak: attention's products on a Hopper, and what a message of some MB reaches of NVLink.
_COMPUTE, _NETWORK = 0.6, 0.7
# Seconds that a step of the ring, or a collective, takes beside that.
_OVERHEAD = 20e-6
# Queries and keys of a tile, and how many rows of them are looked at, at most.
_TILE, _ROWS = 128, 1024


@dataclass(frozen=True)
class Cost:
    """What one method costs, forward.

    Attributes:
      sent: bytes that a device sends.
      compute: seconds of the busiest device's products.
      exposed: seconds of messages that nothing hides.
      misfit: why it can't run; None if it can.
    """

    sent: int
    compute: float
    exposed: float
    misfit: str | None = None

    @property
    def seconds(self) -> float:
        """Both."""
        return self.compute + self.exposed


@dataclass(frozen=True)
class Plan:
    """What `which` returns; `print` shows it.

    Attributes:
      method: the one to run.
      why: in one line.
      costs: of each method.
      load: the tiles of each device; None where the layout is not known.
      device: whose rates were taken.
    """

    method: Method
    why: str
    costs: dict[Method, Cost]
    load: Load | None
    device: str

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.why}"]
        if self.load is not None:
            lines.append(
                f"tiles of the busiest device: {self.load.imbalance:.3f} of the mean over devices"
            )
        for name, cost in self.costs.items():
            if cost.misfit:
                lines.append(f"{name:<10}  can't run: {cost.misfit}")
                continue
            lines.append(
                f"{name:<10}  {cost.seconds * 1e3:9.3f} ms = {cost.compute * 1e3:9.3f} computing + "
                f"{cost.exposed * 1e3:.3f} waiting for messages; {cost.sent / 1e6:,.1f} MB sent"
            )
        return "\n".join(lines)


def which(
    q: jax.ShapeDtypeStruct | jax.Array,
    k: jax.ShapeDtypeStruct | jax.Array,
    v: jax.ShapeDtypeStruct | jax.Array,
    devices: int,
    *,
    mask_mod: Callable | None = None,
    layout: Layout | None = None,
    device: str | None = None,
) -> Plan:
    """Returns which method `attention` of these arguments chooses, and what each would cost.

    Args:
      q, k, v: one device's parts, `[B,T/n,H,D]` and `[B,T/n,K,...]`; only shapes and dtypes count.
      devices: how many share the sequence.
      mask_mod: as of `attention`. Of arrays that are not known the plan assumes that they hide
        nothing.
      layout: as of `attention`.
      device: such as "H200", which it is by default, unless the rates of the one that JAX runs on
        are known.

    >>> from xform import causal
    >>> from xform.sharding import context
    >>> q, k = (jax.ShapeDtypeStruct((1, 8192, h, 128), "bfloat16") for h in (16, 8))
    >>> plan = context.which(q, k, k, 4, mask_mod=causal(), layout=context.zigzag(32768, 4))
    >>> plan.method, round(plan.load.imbalance, 2), plan.costs["ring"].sent
    ('ring', 1.0, 100663296)
    """
    return plan(q, k, v, devices, layout=layout, mask_mod=mask_mod, device=device)


def plan(q, k, v, devices: int, *, layout: Layout | None, mask_mod, device: str | None) -> Plan:
    """`which`, with everything by name."""
    n, (batch, part, heads, size), kv_heads = devices, q.shape, k.shape[2]
    layout = contiguous(n * part, n) if layout is None else layout
    rates = _rates(device)
    tile = _tile(layout)
    tiles, _ = tiles_by_chunk(mask_mod, layout.length, tile, layout.chunk, batch, heads)
    order = layout.order
    load = Load(by_device(tiles, order)) if isinstance(order, np.ndarray) else None
    kind = "bfloat16" if q.dtype.itemsize == 2 else str(q.dtype)
    of_tile = 2 * batch * heads * tile * tile * (size + v.shape[-1])
    of_tile /= rates.peak[kind] * _COMPUTE
    wire = rates.network * _NETWORK
    of_keys = batch * part * kv_heads * (size + v.shape[-1]) * q.dtype.itemsize
    of_queries = batch * part * heads * (size + v.shape[-1]) * q.dtype.itemsize
    mean = tiles.sum() / n
    rounds = np.full(n, mean / n) if load is None else load.rounds
    busiest = mean if load is None else load.each.max()
    live = [step for step in range(n) if rounds[step]] or [0]
    message = of_keys / wire + _OVERHEAD
    hidden = [min(rounds[step] * of_tile, message) for step in live[:-1]]
    copies = n // gcd(kv_heads, n)
    moved = (of_queries + copies * of_keys) * (n - 1) // n
    misfit = f"{n} devices don't divide {heads} query heads" if heads % n else None
    costs: dict[Method, Cost] = {
        "ring": Cost(
            of_keys * (len(live) - 1), float(rounds.sum()) * of_tile,
            message * (len(live) - 1) - float(sum(hidden)),
        ),
        "all_gather": Cost(
            of_keys * (n - 1), float(busiest) * of_tile, of_keys * (n - 1) / wire + _OVERHEAD
        ),
        "ulysses": Cost(moved, float(mean) * of_tile, moved / wire + 2 * _OVERHEAD, misfit),
    }  # fmt: skip
    able: list[Method] = [name for name in METHODS if costs[name].misfit is None]
    ranked: list[Method] = sorted(able, key=lambda name: costs[name].seconds)
    why = ", ".join(f"{name} {costs[name].seconds * 1e3:.3f} ms" for name in ranked)
    return Plan(ranked[0], f"{why} at the rates of {rates.name}", costs, load, rates.name)


def _rates(name: str | None) -> Device:
    if name is not None:
        from xform._devices import device

        return device(name)
    kind = jax.devices()[0].device_kind
    known = [rates for short, rates in DEVICES.items() if short in kind]
    return known[0] if known else DEVICES["H200"]


def _tile(layout: Layout) -> int:
    """The tiles that are counted, of which a chunk has a whole number."""
    least = min(layout.chunk, max(_TILE, layout.length // _ROWS))
    return next(d for d in range(least, layout.chunk + 1) if layout.chunk % d == 0)


def live_steps(mask_mod, layout: Layout, batch: int, heads: int) -> Sequence[int]:
    """Returns the steps of a ring in which some device may have something to do.

    Of a layout that is traced, all are.
    """
    n = layout.devices
    if mask_mod is None or not isinstance(layout.order, np.ndarray):
        return range(n)
    tiles, _ = tiles_by_chunk(mask_mod, layout.length, _tile(layout), layout.chunk, batch, heads)
    rounds = Load(by_device(tiles, layout.order)).rounds
    return [step for step in range(n) if rounds[step]]
