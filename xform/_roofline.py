"""What a device can do at best, and how near a program comes to it.

A roofline (Williams, Waterman and Patterson, doi:10.1145/1498765.1498785) bounds the time of each
line of a program from below by its FLOPs, its memory traffic and its communication. MFU and HFU
(Chowdhery et al., arXiv:2204.02311, appendix B) are the share of a device's peak that a measured
time used: of the model's own FLOPs, or of all that ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xform._amount import number
from xform._costs import Cost, Costs
from xform._devices import Device, device
from xform._show import Table, as_text, page, short


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
    causal attention by half, whatever else its mask hides; a backward pass as twice the forward.

    Args:
      costs: of the program.
      seconds: how long one call took.
      device: what it ran on; by default what JAX runs on.
      devices: how many; by default those that the program spreads over.

    Raises:
      TypeError: if `costs` is not what `cost(f)(…)` returns.
      ValueError: if `seconds` is not positive, or that is more than the device can do.

    >>> import jax, jax.numpy as jnp
    >>> from xform import cost
    >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> mfu(cost(lambda x: x @ x)(x), 200e-6, "H200")
    MFU 69.5% (model FLOPs: products, no recompute, causal attention half; of H200's dense peak)
    """
    _check("mfu", costs)
    what = "model FLOPs: products, no recompute, causal attention half"
    return _utilisation("MFU", costs.model, what, costs, seconds, device, devices)


def hfu(
    costs: Costs, seconds: float, device: Device | str | None = None, *, devices: int | None = None
) -> Utilisation:
    """Returns the hardware-FLOPs utilisation: of all products that ran, recompute included.

    Attention counts the tiles that its mask leaves. Arguments and errors are those of `mfu`.

    >>> import jax, jax.numpy as jnp
    >>> from xform import cost
    >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> twice = jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.tanh(x @ x) @ x)))
    >>> costs = cost(twice)(x)
    >>> hfu(costs, 1e-3, "H200") > mfu(costs, 1e-3, "H200")
    True
    """
    _check("hfu", costs)
    what = "executed FLOPs: products with recompute, attention by tiles that run"
    return _utilisation("HFU", costs.total.matrix, what, costs, seconds, device, devices)


def _utilisation(name, matrix, what, costs: Costs, seconds, on, devices) -> Utilisation:
    if seconds <= 0:
        raise ValueError(f"`seconds={seconds}`: a call takes a positive time.")
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


def _check(name: str, costs: object) -> None:
    if not isinstance(costs, Costs):
        raise TypeError(
            f"`{name}` takes what `cost(f)(…)` returns; found {type(costs).__name__}. "
            f"Call `{name}(cost(f)(*args), …)`."
        )


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


@dataclass(frozen=True, repr=False)
class Roofline:
    """What `roofline` returns. It prints as a table, and shows itself in a notebook.

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

    def __repr__(self) -> str:
        return "\n".join([self._title(), as_text(self._table(), margin="")])

    def _repr_html_(self) -> str:
        return page(self._title(), [self._table()], [])

    def _title(self) -> str:
        return f"at least {self.seconds:.3g} s on {self.device.name} ({self.device.source})"

    def _table(self) -> Table:
        head = ("at best, s", "bound by", "FLOP/B", "line")
        cells = lambda b: (f"{b.seconds:.2e}", b.by, f"{b.intensity:,.1f}", short(b.line))
        rows = [cells(b) for b in self.lines[:12] if b.seconds]
        return Table("", head, rows)


def roofline(costs: Costs, device: Device | str | None = None) -> Roofline:
    """Returns the least time of each line of a program, and what bounds it.

    Args:
      costs: of the program, without unknown trip counts; spread evenly over its devices.
      device: a `Device`, the name of one ("H200"), or None for what JAX runs on.

    Raises:
      TypeError: if `costs` is not what `cost(f)(…)` returns.
      ValueError: if a trip count is unknown, or the peak of what is multiplied.

    >>> import jax, jax.numpy as jnp
    >>> from xform import cost
    >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    >>> roofline(cost(lambda x: x @ x)(x), "H200").lines[0].by
    'compute'
    """
    _check("roofline", costs)
    on = _as_device(device)
    vector = on.peak["float32@highest"]

    def bound(line: str, c: Cost) -> Bound:
        pointwise = float(c.other + c.transcendentals) / vector
        network = sum(map(float, c.collective_bytes.values()))
        compute = on.seconds({k: float(n) for k, n in c.matrix.items()}) + pointwise
        return Bound(line, c, compute, float(c.fused_bytes) / on.bandwidth, network / on.network)

    bounds = [bound(line, c) for line, c in costs.by_line(per_device=True).items()]
    return Roofline(on, tuple(sorted(bounds, key=lambda b: -b.seconds)))
