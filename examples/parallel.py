"""How the model of llama.py lies on a mesh of `dp` × `cp` × `tp`, and what gradients go through.

Devices along `dp` have different rows, those along `cp` different positions of a row, dealt out in
zigzag, and those along `tp` different parts of the matrices; a mesh may lack `cp`. Along `ep`, if
there is one, they have different rows, and different experts. With `fsdp`, `dp` splits parameters,
gradients and the optimiser's state as well, and each layer's are gathered a little before their
use. With `sequence`, `tp` splits positions between blocks too, and with `overlap` the products
there hide their own communication.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

import llama
from xform import precision
from xform.sharding import (
    TensorParallel,
    check_divisible,
    context,
    data,
    declare,
    fsdp,
    place,
    shardings,
)
from xform.sharding.context import ContextParallel
from xform.sharding.experts import ExpertParallel


@dataclass(frozen=True)
class Layout:
    """What is split; every layout trains the same model to the same numbers, but for rounding.

    And but for experts: losses of routers are means over the tokens of a microbatch, which count by
    its labels, and a capacity drops among the positions of a row that a device has. So
    `microbatches` changes the former, and the size of `cp` what is dropped.
    """

    fsdp: bool = False
    """Split parameters and the optimiser's state over `dp`, and gather each layer for its use."""
    ahead: int = 1
    """How many layers ahead they are gathered."""
    keep: bool = False
    """Keep gathered layers from the forward to the backward pass."""
    sequence: bool = False
    """Split positions over `tp` between blocks."""
    overlap: Literal["ring", "pallas"] | None = None
    """Hide the communication of blocks behind their products."""
    context: Literal["ring", "all_gather", "ulysses"] | None = None
    """How attention crosses `cp`; by default, what costs least."""
    microbatches: int = 1
    """In how many parts, one after another, a device works on its rows."""
    late: bool = False
    """Under `fsdp`, sum the gradients of layers once, after all microbatches, for more memory."""

    @property
    def tp(self) -> TensorParallel:
        """How blocks are split."""
        return TensorParallel("tp", self.sequence, self.overlap)


PLAIN = Layout()


def check(layout: Layout, model: llama.Config, mesh: Mesh, batch: int, length: int) -> None:
    """Raises unless model and batch divide over the mesh."""
    m, parts = model, layout.microbatches
    split = {"heads": m.heads, "kv_heads": m.kv_heads, "hidden": m.hidden, "codes": m.codes}
    split |= {"shared": m.shared}
    if layout.sequence:
        split["length"] = length
    check_divisible(mesh, dp={"batch": batch}, tp=split)
    if "ep" in mesh.shape:
        check_divisible(mesh, ep={"experts": m.experts, "batch / dp": batch // mesh.shape["dp"]})
    if "cp" in mesh.shape:  # which has two parts of each row
        check_divisible(mesh, cp={"length / 2": length // 2 if length % 2 == 0 else 1})
    n = mesh.shape["dp"] * mesh.shape.get("ep", 1)
    if batch // n % parts:
        raise ValueError(
            f"microbatches={parts} must divide the {batch // n} rows of a device: batch={batch} "
            f"over {n} devices with rows of their own."
        )
    specs_for(layout, model, mesh)


def of_rows(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes along which devices have different tokens."""
    return tuple(axis for axis in ("dp", "ep", "cp") if axis in mesh.axis_names)


def specs_of_rows(mesh: Mesh | AbstractMesh) -> P:
    """Returns how rows and their positions are split."""
    rows = ("dp", "ep") if "ep" in mesh.axis_names else "dp"
    return P(rows, "cp") if "cp" in mesh.axis_names else P(rows)


def place_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """Returns rows of the host on the mesh, their positions dealt out over `cp`."""
    if "cp" in mesh.shape:
        length = rows.tokens.shape[1]
        rows = context.zigzag(length, mesh.shape["cp"]).split(rows)
    return place(rows, shardings(mesh, specs_of_rows(mesh)))


def context_of(layout: Layout, length: int) -> ContextParallel:
    """Returns how rows are split over the mesh that a device is part of, which has `length`."""
    mesh = jax.sharding.get_abstract_mesh()
    if "cp" not in mesh.axis_names:
        return ContextParallel()
    n = mesh.shape["cp"]
    return ContextParallel("cp", layout.context, context.zigzag(length * n, n))


def experts_of(layout: Layout) -> ExpertParallel:
    """Returns how experts are dealt out over the mesh that a device is part of."""
    mesh = jax.sharding.get_abstract_mesh()
    return ExpertParallel("ep" if "ep" in mesh.axis_names else None, layout.tp)


def specs_for(layout: Layout, model: llama.Config, mesh: Mesh) -> dict:
    """Returns how parameters are split where they rest."""
    specs = llama.specs_of(model)
    if not layout.fsdp:
        return specs
    shapes = jax.eval_shape(partial(llama.init, model), jax.random.key(0))
    layers = fsdp.split(specs["layers"], shapes["layers"], mesh, skip=1)
    rest = {name: spec for name, spec in specs.items() if name != "layers"}
    return {**fsdp.split(rest, {name: shapes[name] for name in rest}, mesh), "layers": layers}


def loss_of(layout: Layout, model: llama.Config, specs: dict, policy: str = "f32") -> Callable:
    """Returns the loss of parameters that `enter` has made ready, and of rows."""
    scan = llama.one_by_one
    if layout.fsdp:
        of_layer = {name: P(*spec[1:]) for name, spec in specs["layers"].items()}
        gather = partial(data.gather, specs=of_layer, axis="dp")
        through = partial(fsdp.scan_layers, gather=gather, ahead=layout.ahead, keep=layout.keep)
        # Its derivative is written out, and a policy stops there: each layer has its own.
        scan = lambda step, x, stack: through(precision(step, policy), x, stack)

    def loss(params, rows):
        cp = context_of(layout, rows.tokens.shape[1])
        return llama.loss(params, rows, model, layout.tp, scan, cp, experts_of(layout))

    return loss


def enter(params: dict, layout: Layout, specs: dict) -> dict:
    """Returns the parameters as each device's own, whole over `dp` but for layers under `fsdp`.

    Once, and before any loop: so the sums over devices of their gradients are taken once as well.
    """
    # Where positions are split, what lies between blocks is used on a part of them.
    axes = of_rows(jax.sharding.get_abstract_mesh())
    own = data.per_device(params, (*axes, "tp") if layout.sequence else axes)
    layers = own.pop("layers")
    ready = data.gather(own, {name: specs[name] for name in own}, "dp")
    gather = partial(data.gather, specs=specs["layers"], axis="dp")
    if not layout.fsdp:
        return {**ready, "layers": gather(layers)}
    return {**ready, "layers": fsdp.late(layers, gather) if layout.late else layers}


def loss_and_grads(
    params: dict,
    rows,
    model: llama.Config,
    layout: Layout = PLAIN,
    specs: dict = llama.SPECS,
    policy: str = "f32",
) -> tuple[jax.Array, dict]:
    """Returns the mean loss of all labels and its gradients; runs on each device in `shard_map`."""
    ready = partial(enter, layout=layout, specs=specs)
    loss = precision(loss_of(layout, model, specs, policy), policy)
    axes = of_rows(jax.sharding.get_abstract_mesh())
    return data.value_and_grad(loss, ready, axes, microbatches=layout.microbatches)(params, rows)


@cache  # so that what was traced and compiled for them is found again
def gradients(
    model: llama.Config, mesh: Mesh, layout: Layout = PLAIN, policy: str = "f32"
) -> Callable:
    """Returns the mean loss and the gradients of parameters and rows, over the mesh."""
    specs = specs_for(layout, model, mesh)
    body = partial(loss_and_grads, model=model, layout=layout, specs=specs, policy=policy)
    body = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, specs_of_rows(mesh)), out_specs=(P(), specs)
    )
    return jax.jit(body)


@cache
def sums(model: llama.Config, mesh: Mesh, layout: Layout = PLAIN) -> Callable:
    """Returns the summed loss of parameters and rows, and the number of labels, over the mesh.

    Of labels alone: what routers add is for training.
    """
    specs = specs_for(layout, model, mesh)
    loss = loss_of(layout, replace(model, balance=0.0, router_z=0.0), specs)

    def body(params, rows):
        found = loss(enter(params, layout, specs), rows)
        with declare("sums", *of_rows(mesh)):
            return jax.lax.psum(found, of_rows(mesh))

    in_specs = (specs, specs_of_rows(mesh))
    body = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P())
    return jax.jit(body)


def placement(layout: Layout, model: llama.Config, mesh: Mesh) -> dict:
    """Returns where each parameter rests."""
    return shardings(mesh, specs_for(layout, model, mesh))
