"""What messages take: a step's latency times the steps, and bytes over what carries them (α-β).

A group of `n` devices lies `stride` apart: axes are laid out innermost first, `tp`, `cp`, `pp`,
`dp`, so that the stride of an axis is the product of those inside. Collectives go in rings, as NCCL
moves large arrays: of a gather each device sends (n - 1)/n of the whole, in n - 1 steps. Within a
node NVLink carries them. Between nodes, a ring enters and leaves a node once for each member that
it has there, each over its own port; so with g members of a group in a node, a ring's rate is g
ports'. Between pods, the ports of a pod share what the oversubscription leaves; of a ring's m
members in a pod one is at its end, so that 1/m of the ports have to cross.
"""

from __future__ import annotations

from typing import NamedTuple

from xform.sharding.pipeline._times import Real
from xform.sharding.plan._machine import Machine

# How often the whole array passes a device's port: bytes sent are (n - 1)/n of it, this often.
ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}


class Group(NamedTuple):
    """The devices along an axis.

    Attributes:
      size: how many.
      stride: how far apart they are.
    """

    size: int
    stride: int


def rate(group: Group, on: Machine) -> tuple[Real, Real]:
    """Returns the bytes/s of a device in a ring over the group, and the seconds of a step."""
    n, stride = group
    fabric, links = on.fabric, on.device.network * on.rates.link
    if n * stride <= fabric.node:
        return links, fabric.link_hop
    ports = fabric.nic * on.rates.network * max(1, fabric.node // stride)
    if fabric.pod is not None and n * stride > fabric.pod:
        members = max(1, fabric.pod // stride)
        ports /= max(1.0, fabric.oversubscription / members)
    return min(links, ports), fabric.network_hop


def collective(kind: str, nbytes: Real, group: Group, on: Machine) -> Real:
    """Returns the seconds of a collective.

    Args:
      kind: of `ROUNDS`.
      nbytes: of the whole array: what a gather ends with, what a scatter begins with; for an
        all-to-all, of a device's own part.
      group: who takes part.
      on: the machine.

    >>> from xform.sharding.plan import machine
    >>> eight = machine("H100", 8)
    >>> round(1e3 * collective("all-gather", 2**30, Group(8, 1), eight), 2)  # ms
    2.62
    """
    n = group.size
    if n == 1:
        return 0.0
    per_second, hop = rate(group, on)
    return ROUNDS[kind] * (n - 1) * (hop + nbytes / n / per_second)


def send(nbytes: Real, stride: int, on: Machine) -> Real:
    """Returns the seconds of a message to the next device of an axis."""
    # Of a pipeline's ranks, those at a pod's edge alone send across; the slowest decides.
    fabric = on.fabric
    if 2 * stride <= fabric.node:
        return fabric.link_hop + nbytes / (on.device.network * on.rates.link)
    return fabric.network_hop + nbytes / (fabric.nic * on.rates.network)
