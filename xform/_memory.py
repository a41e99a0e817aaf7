"""`memory`: how much a program needs at once, before it is compiled.

XLA is predicted, not run: `xform._buffers` models its fusion and buffer assignment. On accelerators
a program runs in its own order, since XLA schedules for memory there; on CPUs each operation runs
as soon as it can. `tests/test_memory.py` holds the model to 10 % of XLA's own buffer assignment,
for a CPU and for an H200. A larger batch may need less, where XLA needs less: from 4,096 rows on a
CPU's library takes in the statistics of norms, and a GPU splits the sums of fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from xform._amount import number
from xform._buffers import Plan
from xform._compat import Jaxpr
from xform._devices import device as known_device
from xform._expand import expand, is_gpu, rules_of
from xform._library import hand_over
from xform._lowered import compiled, dense, on_platform
from xform._masked import mask_at_once
from xform._products import activated
from xform._products import at_once as products_at_once
from xform._program import Region, Value, array_bytes, merge, own_inputs, program, prune
from xform._rows import by_rows
from xform._show import Table, page, short
from xform.jaxpr._trace import given_away, trace_call


@dataclass(frozen=True)
class Buffer:
    """One array in memory.

    Attributes:
      bytes: on one device.
      type: its dtype and shape, "f32[8,256]".
      line: the user's line that made it, or "argument".
      what: the primitive that made it, or the path of the argument.
    """

    bytes: int
    type: str
    line: str
    what: str

    def __str__(self) -> str:
        return f"{number(self.bytes)}B  {self.type}  {self.what} at {short(self.line)}"


@dataclass(frozen=True, repr=False)
class Memory:
    """What `memory` returns: bytes on one device. It prints as tables, as a notebook shows it.

    Attributes:
      peak: the most that is allocated at once: arguments, results and all between.
      arguments, outputs: of these.
      donated: the part of the arguments whose memory results take over.
      at_peak: what exists at the peak, the largest first; less than it where a heap leaves gaps.
      peak_line: where the peak is.
      residuals: what the forward pass leaves for the backward, the largest first, with the line
        that made it; of a scan, stacked over its iterations.
      peak_otherwise: the peak in another order: breadth first, where `peak` is for a device that
        orders for memory, and in program order, where it is for a CPU.
    """

    peak: int
    arguments: int
    outputs: int
    donated: int
    at_peak: tuple[Buffer, ...]
    peak_line: str
    residuals: tuple[Buffer, ...] = ()
    peak_otherwise: int = 0

    @property
    def temporaries(self) -> int:
        """What is needed beyond arguments and results."""
        return max(0, self.peak - self.arguments - self.outputs + self.donated)

    @property
    def residual_bytes(self) -> int:
        """What the forward pass leaves for the backward."""
        return sum(b.bytes for b in self.residuals)

    @property
    def depends_on_schedule(self) -> bool:
        """Whether another order of the same operations could need over a tenth more."""
        return self.peak_otherwise > 1.1 * self.peak

    def top(self, n: int = 5) -> tuple[Buffer, ...]:
        """The n largest arrays at the peak, such as the errors of an allocator should list."""
        return self.at_peak[:n]

    def __repr__(self) -> str:
        lines = [self._title(), *(f"  {b}" for b in self.top())]
        if self.residuals:
            lines.append(f"kept for the backward pass: {number(self.residual_bytes)}B")
            lines += [f"  {b}" for b in self.residuals[:5]]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        head = ("bytes", "type", "made by", "line")
        row = lambda b: (f"{number(b.bytes)}B", b.type, b.what, short(b.line))
        tables = [Table("The largest at the peak", head, [row(b) for b in self.top()])]
        if self.residuals:
            title = f"Kept for the backward pass: {number(self.residual_bytes)}B"
            tables.append(Table(title, head, [row(b) for b in self.residuals[:5]]))
        return page(self._title(), tables, self._notes())

    def _title(self) -> str:
        return (
            f"peak {number(self.peak)}B at {short(self.peak_line)}: "
            f"arguments {number(self.arguments)}B, results {number(self.outputs)}B, "
            f"donated {number(self.donated)}B, temporaries {number(self.temporaries)}B"
        )

    def _notes(self) -> list[str]:
        if not self.depends_on_schedule:
            return []
        return [
            f"the schedule decides: up to {number(self.peak_otherwise)}B in another order of "
            "the same operations; a `scan` over equal layers fixes the order"
        ]


def memory(
    f: Callable, *, donate_argnums: int | Sequence[int] = (), device: str | None = None
) -> Callable[..., Memory]:
    """Returns a function that predicts the memory that a call of `f` needs, and compiles nothing.

    Args:
      f: a function of pytrees of arrays. What a jitted one donates is known.
      donate_argnums: positional arguments to donate besides.
      device: "cpu", whose compiler orders a program breadth first, or an accelerator ("gpu", "tpu",
        or one by name, "H200"), whose compiler orders it for memory; by default what JAX runs on.

    Returns:
      A function of the arguments of `f`, which may be `jax.ShapeDtypeStruct`s, that returns
      `Memory`. An argument with a sharding counts what one device holds of it.

    Raises:
      ValueError: if there is no such argument to donate, or no such device.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> memory(lambda x: jnp.sin(x @ x) @ x)(x).peak == 3 * 4 * 1024**2  # x, the sine, the result
    True
    """
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    def predicted(*args, **kwargs) -> Memory:
        if wrong := [i for i in donate if not -len(args) <= i < len(args)]:
            raise ValueError(
                f"`donate_argnums={donate}` names arguments {wrong} of a call with {len(args)} "
                "positional ones; an argument by keyword is donated by `jax.jit(donate_argnames=…)`"
            )
        gone = {i % len(args) for i in donate}
        call = trace_call(f, args, kwargs)
        donated = [
            by_jit or position in gone
            for by_jit, position in zip(call.donated, call.positions, strict=True)
        ]
        return memory_of(call.jaxpr, call.args, names=call.names, donated=donated, device=device)

    return predicted


def memory_of(
    jaxpr: Jaxpr,
    args: Sequence[Any] = (),
    *,
    names: Sequence[str] = (),
    donated: Sequence[bool] = (),
    device: str | None = None,
    at_once: bool | None = None,
) -> Memory:
    """Returns what a closed jaxpr needs; `args` may carry shardings, `names` are for the report.

    `at_once`: whether sums start as soon as they can, breadth first; by default on a CPU.
    """
    plan, inputs = _planned(jaxpr, args, donated, device, at_once)
    region, matched = plan.given, plan.donated
    names = list(names) or [f"[{i}]" for i in range(len(inputs))]
    label = {v: f"argument{name}" for v, name in zip(inputs, names, strict=True)}
    found = plan.peak()
    other = plan.otherwise().peak()
    taken = list(matched.values())
    results = [v for v in region.outputs if v not in taken or taken.remove(v)]
    size = lambda values: sum(map(plan.bytes, values))
    fixed = size(region.inputs) + size(results)
    at_peak = [*found.live, *region.inputs, *(v for v in results if v.known is None)]
    return Memory(
        peak=fixed + found.bytes,
        arguments=size(region.inputs),
        outputs=size(region.outputs),
        donated=size(matched),
        at_peak=_largest(_buffer(v, plan.bytes(v), label) for v in at_peak),
        peak_line=found.node.line if found.node else "its results",
        residuals=_largest(_residuals(plan)),
        peak_otherwise=fixed + other.bytes,
    )


def temporaries_of(
    jaxpr: Jaxpr, *, device: str | None = None, at_once: bool | None = None
) -> tuple[int, int]:
    """Returns what a closed jaxpr needs beside arguments and results, and that in another order."""
    plan, _ = _planned(jaxpr, (), (), device, at_once)
    return plan.peak().bytes, plan.otherwise().peak().bytes


def _planned(
    jaxpr: Jaxpr, args: Sequence[Any], donated: Sequence[bool], device: str | None,
    at_once: bool | None,
) -> tuple[Plan, list[Value]]:  # fmt: skip
    """The buffers of a closed jaxpr, and its inputs; see `memory_of`."""
    donated = list(donated) or given_away(jaxpr)
    name = device or jax.default_backend()
    breadth_first = orders_breadth_first(name)
    platform = "cpu" if breadth_first else "tpu" if "tpu" in name.lower() else "cuda"
    ragged = compiled if platform == "tpu" else dense
    lower = partial(on_platform, platform=platform, lower=ragged)
    region = prune(merge(program(jaxpr, lower=lower), stacks=not breadth_first))
    if not breadth_first:
        mask_at_once(region)
    if is_gpu(name):
        activated(products_at_once(region))
    region = prune(expand(region, rules_of(name)))
    if is_gpu(name):
        by_rows(region)
    inputs = region.inputs[len(jaxpr.consts) :]
    shares = _shares(region, inputs, args)
    if breadth_first:
        shares = _shared_alike(hand_over(region), shares)
    matched = _match(inputs, donated, region.outputs)
    plan = Plan(
        region, shares, donated=matched, cpu=breadth_first, eager=breadth_first, at_once=at_once
    )
    return plan, inputs


# Of all of these the compiler orders a program for memory.
_ACCELERATORS = ("accelerator", "gpu", "cuda", "rocm", "tpu")


def orders_breadth_first(name: str) -> bool:
    """Whether the compiler of a device runs each operation as soon as it can."""
    if name.lower() in ("cpu", *_ACCELERATORS):
        return name.lower() == "cpu"
    known_device(name)  # or else it raises
    return False


def _largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted((b for b in buffers if b.bytes), key=lambda b: -b.bytes))


def _buffer(v: Value, nbytes: int, label: dict[Value, str]) -> Buffer:
    if v.node is None:
        where = "argument" if v in label else "a loop's body"
        what = label.get(v, "constant" if v.known is not None else "slice of a scanned array")
    else:
        where, what = v.node.line, v.node.name
    return Buffer(nbytes, v.aval.str_short(short_dtypes=True), where, what)


def _match(
    inputs: Sequence[Value], donated: Sequence[bool], outputs: Sequence[Value]
) -> dict[Value, Value]:
    """The donated inputs, each with the output of the same type that takes over its memory."""
    form = lambda v: (v.aval.shape, v.aval.dtype)
    free = [v for v in outputs if v.known is None]
    matched = {}
    for v, gone in zip(inputs, donated, strict=True):
        takes = next((out for out in free if gone and form(out) == form(v)), None)
        if takes is not None:
            free.remove(takes)
            matched[v] = takes
    return matched


# ---- how much of a value one device holds --------------------------------------------------------


def _shares(region: Region, inputs: Sequence[Value], args: Sequence[Any]) -> dict[Value, int]:
    """Of each value that is split over devices, the bytes that one device holds."""
    local: dict[Value, int] = {}
    for v, arg in zip(inputs, args, strict=False):
        sharding = getattr(arg, "sharding", None)
        if sharding is not None and v.aval.shape:
            shard = math.prod(sharding.shard_shape(v.aval.shape))
            if shard < v.size:
                local[v] = array_bytes(shard, v.aval.dtype)
    for node in region.walk():
        if node.name == "shard_map":
            body = node.regions["body"]
            inside = own_inputs(node.eqn.params["jaxpr"], body)
            pairs = [
                *zip(node.ins, inside, strict=True),
                *zip(node.outs, body.outputs, strict=True),
            ]
            local.update(
                {outer: inner.bytes for outer, inner in pairs if inner.bytes < outer.bytes}
            )
    return _shared_alike(region, local)


def _shared_alike(region: Region, local: dict[Value, int]) -> dict[Value, int]:
    """Adds what is computed element by element, which is split as its operands are."""
    for node in region.nodes if local else ():
        for out in node.outs:
            like = [v for v in node.ins if v in local and v.size == out.size and v.bytes]
            if out not in local and like and not node.regions:
                local[out] = local[like[0]] * out.bytes // like[0].bytes
    return local


def _residuals(plan: Plan) -> list[Buffer]:
    """What the forward pass makes and the backward pass reads."""
    nodes = plan.region.nodes
    read = (v for node in nodes if node.phase != "forward" for v in node.ins)
    leaves = {leaf for v in read for leaf in plan.leaves.get(v, ())}
    made = (v for node in nodes if node.phase == "forward" for v in node.outs)
    return [_residual(v, plan) for v in made if v in leaves]


def _residual(v: Value, plan: Plan) -> Buffer:
    """A residual with the line that made it: of a loop's result, the line in its body."""
    made, maker = v, v.node
    while maker is not None and maker.regions and "body" in maker.regions:
        made = maker.regions["body"].outputs[maker.outs.index(made)]
        if made.node is None:
            break
        maker = made.node
    assert maker is not None
    return Buffer(plan.bytes(v), v.aval.str_short(short_dtypes=True), maker.line, maker.name)
