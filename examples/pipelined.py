"""The model of llama.py in a pipeline: `pp` splits layers, beside what parallel.py splits.

A stage is some layers. Microbatches go from rank to rank as a schedule says, which is a table:
one of the field's by its name, or your own in a file. While it trains, layers lie in the order in
which ranks own them, stacked by stages; where they rest, in a checkpoint, in the model's order, so
that a run goes on with another schedule, or with none: `schedule=None` is parallel.py's business.

Validation and what else needs no gradients have no pipeline: there the devices along `pp` have
rows of their own, and gather layers as they need them (`flat`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import between
import llama
import parallel
from parallel import Layout
from xform import precision
from xform.sharding import check_divisible, data, fsdp, settle, shardings
from xform.sharding.pipeline import BUILDERS, Schedule, build, by_rank, one_program, per_stage
from xform.train.data import NO_LABEL, Rows

type Executor = Literal["one_program", "per_stage"]
EXECUTORS = {"one_program": one_program, "per_stage": per_stage}
# What torch's tables say of sharded weights, which the layout decides here.
OF_WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def schedule_of(name: str, ranks: int, microbatches: int | None = None) -> Schedule:
    """Returns the schedule of a name, by default of twice as many microbatches; or a file's."""
    if name in BUILDERS:
        return build(name, ranks, microbatches or 2 * ranks)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"schedule={name} is neither a file nor one of {', '.join(BUILDERS)}: name one of "
            "these, or write a table to a file (text, or CSV as torch.distributed.pipelining's)."
        )
    options = {"ignore": OF_WEIGHTS} if path.suffix == ".csv" else {}
    found = Schedule.load(path, **options)
    if found.ranks != ranks or microbatches not in (None, found.microbatches):
        wanted = "any number of" if microbatches is None else microbatches
        raise ValueError(
            f"schedule={name} is a table of {found.ranks} ranks and {found.microbatches} "
            f"microbatches, and the run has pp={ranks} and {wanted} microbatches."
        )
    return found


def check(
    layout: Layout,
    model: llama.Config,
    mesh: Mesh,
    batch: int,
    length: int,
    schedule: Schedule | None,
) -> None:
    """Raises unless model and batch divide over the mesh and the schedule."""
    if schedule is None:
        return parallel.check(layout, model, mesh, batch, length)
    wrong = []
    if layout.keep:
        wrong.append("layout.keep would keep layers for every microbatch on its way: set late")
    if model.experts:
        wrong.append(
            "model.experts have a loss of their own, which no stage sends on: leave pp out"
        )
    if layout.microbatches > 1:
        wrong.append("layout.microbatches is a stage's own: a pipeline's are --microbatches")
    if model.layers % schedule.stages:
        wrong.append(f"layers={model.layers} is no multiple of the {schedule.stages} stages")
    elif layout.fsdp and not layout.late and layout.ahead > model.layers // schedule.stages:
        n = model.layers // schedule.stages
        wrong.append(f"layout.ahead={layout.ahead} is more than the {n} layers of a stage")
    if batch % (mesh.shape["dp"] * schedule.microbatches):
        wrong.append(
            f"batch={batch} is no multiple of dp={mesh.shape['dp']} × "
            f"{schedule.microbatches} microbatches"
        )
    if wrong:
        raise ValueError(f"pipeline: {'; '.join(wrong)}.")
    whole, plain = flat(mesh, layout)
    # Rows and what splits parameters, of the pipeline and of what has none.
    parallel.check(plain, model, whole, batch, length)
    check_divisible(mesh, tp={"heads": model.heads, "kv_heads": model.kv_heads})
    specs_for(layout, model, mesh, schedule)
    return None


# ---- where parameters lie ------------------------------------------------------------------------


def specs_for(layout: Layout, model: llama.Config, mesh: Mesh, schedule: Schedule | None) -> dict:
    """Returns how parameters are split while they are trained, layers stacked by stages."""
    if schedule is None:
        return parallel.specs_for(layout, model, mesh)
    specs = {**llama.SPECS, "layers": {}}
    for name, spec in llama.SPECS["layers"].items():
        specs["layers"][name] = P("pp", None, *spec[1:])
    if not layout.fsdp:
        return specs
    shapes = jax.eval_shape(partial(first_params, model, schedule), jax.random.key(0))
    layers = fsdp.split(specs["layers"], shapes["layers"], mesh, skip=2)
    return {**fsdp.split(ends(specs), ends(shapes), mesh), "layers": layers}


def ends(params: dict) -> dict:
    """Returns what lies before and behind the layers."""
    return {name: part for name, part in params.items() if name != "layers"}


def first_params(model: llama.Config, schedule: Schedule | None, key: jax.Array) -> dict:
    """Returns the fresh parameters of `llama.init`, layers by the stages of ranks."""
    params = llama.init(model, key)
    if schedule is None:
        return params
    stages = lambda x: x.reshape(schedule.stages, -1, *x.shape[1:])
    return {**params, "layers": by_rank(jax.tree.map(stages, params["layers"]), schedule)}


def placement(layout: Layout, model: llama.Config, mesh: Mesh, schedule: Schedule | None) -> dict:
    """Returns where each parameter is while it is trained."""
    return shardings(mesh, specs_for(layout, model, mesh, schedule))


def shapes(
    layout: Layout,
    model: llama.Config,
    mesh: Mesh,
    schedule: Schedule | None,
    size: tuple[int, int],
) -> tuple[dict, Rows]:
    """Returns shapes and placement of parameters, and of so many rows of so many tokens."""
    struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.eval_shape(partial(first_params, model, schedule), jax.random.key(0))
    params = jax.tree.map(struct, params, placement(layout, model, mesh, schedule))
    rows = jax.eval_shape(lambda: Rows(*[np.zeros(size, np.int32)] * 3))
    at = shardings(mesh, parallel.specs_of_rows(mesh))
    return params, jax.tree.map(lambda x: struct(x, at), rows)


def rest_placement(
    layout: Layout, model: llama.Config, mesh: Mesh, schedule: Schedule | None
) -> dict:
    """Returns where each parameter is after `at_rest`."""
    specs = specs_for(layout, model, mesh, schedule)
    if schedule is not None:
        layers = {name: P("pp", *spec[2:]) for name, spec in specs["layers"].items()}
        specs = {**specs, "layers": layers}
    return shardings(mesh, specs)


def at_rest(state, schedule: Schedule | None):
    """Returns a state of training with layers in the model's order: what a checkpoint holds."""
    if schedule is None:
        return state
    order = np.argsort(_order(schedule))

    def of(x):
        spec = _specs(x)
        x = _in_order(x, order)
        shape, spec = (-1, *x.shape[2:]), P("pp", *spec[2:])
        return jnp.reshape(x, shape, out_sharding=shardings(x.sharding.mesh, spec))

    return _of_layers(of, state)


def in_ranks(state, schedule: Schedule | None):
    """Returns what `at_rest` was given."""
    if schedule is None:
        return state
    order = _order(schedule)

    def of(x):
        shape, spec = (len(order), -1, *x.shape[1:]), P("pp", None, *_specs(x)[1:])
        x = jnp.reshape(x, shape, out_sharding=shardings(x.sharding.mesh, spec))
        return _in_order(x, order)

    return _of_layers(of, state)


def _order(schedule: Schedule) -> np.ndarray:
    return by_rank(np.arange(schedule.stages), schedule)


def _of_layers(of: Callable, state):
    """The state with `of` applied to parameters and moments of layers, one after another."""
    inside = lambda path: any(getattr(key, "key", None) == "layers" for key in path)
    return jax.tree.map_with_path(lambda path, x: of(x) if inside(path) else x, state)


def _in_order(x, order: np.ndarray):
    """An array with its first dim in another order; on the way, every device has all of it."""
    if (order == np.arange(len(order))).all():
        return x
    whole = jax.sharding.reshard(x, shardings(x.sharding.mesh, P(None, *_specs(x)[1:])))
    return jax.sharding.reshard(whole[order], x.sharding)


def _specs(x) -> tuple:
    """How each dim of an array is split."""
    return (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]


# ---- loss and gradients --------------------------------------------------------------------------


def gradients(
    model: llama.Config,
    mesh: Mesh,
    layout: Layout,
    policy: str,
    schedule: Schedule | None,
    executor: Executor = "one_program",
) -> Callable:
    """Returns the mean loss and the gradients of parameters and rows, over the mesh."""
    if schedule is None:
        return parallel.gradients(model, mesh, layout, policy)
    specs = specs_for(layout, model, mesh, schedule)
    functions = functions_of(layout, model, specs, policy)
    axes = parallel.of_rows(mesh)
    options = dict(mesh=mesh, weights=specs["layers"], shared=ends(specs), batch=P(None, *axes))
    run = EXECUTORS[executor](
        *functions, **options, enter=partial(enter, layout=layout, specs=specs)
    )

    def cut(rows):
        """In each device, its rows as microbatches."""
        part = lambda x: x.reshape(schedule.microbatches, -1, *x.shape[1:])
        of = lambda rows: jax.tree.map(part, rows)
        return jax.shard_map(of, mesh=mesh, in_specs=P(*axes), out_specs=P(None, *axes))(rows)

    def mean(total, grads, rows):
        count = jnp.maximum(jnp.sum(rows.labels != NO_LABEL), 1).astype(total.dtype)
        return total / count, jax.tree.map(lambda g: g / count.astype(g.dtype), grads)

    def step(params, rows):
        rows = cut(rows)
        total, (layers, others) = run(schedule, params["layers"], ends(params), rows)
        return mean(total, {**others, "layers": layers}, rows)

    if executor == "one_program":
        return jax.jit(step)
    cut, mean = jax.jit(cut), jax.jit(mean)  # each stage has programs of its own
    return lambda params, rows: settle(step(params, rows))


def functions_of(layout: Layout, model: llama.Config, specs: dict, policy: str) -> tuple:
    """Returns a stage, what comes before the first, and the loss after the last."""
    scan, tp = llama.one_by_one, layout.tp
    if layout.fsdp and not layout.late:
        of_layer = {name: P(*spec[2:]) for name, spec in specs["layers"].items()}
        gather = partial(data.gather, specs=of_layer, axis="dp")
        through = partial(fsdp.scan_layers, gather=gather, ahead=layout.ahead)
        # As in parallel.py: a policy stops at a derivative that is written out.
        scan = lambda step, x, stack: through(precision(step, policy), x, stack)

    def stage(layers, x_BTM, rows):
        cp = parallel.context_of(layout, rows.ids.shape[1])
        return llama.through(layers, x_BTM, rows.ids, model, tp, scan, cp)[0]

    def first(params, rows):
        return tp.embed(params["embed"], rows.tokens)

    def last(params, x_BTM, rows):
        x_BTM = between.norm(model.norm_eps, model.fuse)(x_BTM, params["norm"])
        axes = parallel.of_rows(jax.sharding.get_abstract_mesh())
        return jax.lax.psum(llama.surprise(params, x_BTM, rows.labels, tp)[0], axes)

    return tuple(precision(f, policy) for f in (stage, first, last))


def enter(layers: dict, params: dict, layout: Layout, specs: dict) -> tuple[dict, dict]:
    """Returns the parameters as each device's own, whole over `dp` but for layers under `fsdp`.

    Once, and before all microbatches: so the sums over devices of their gradients are taken once.
    """
    axes = parallel.of_rows(jax.sharding.get_abstract_mesh())
    axes = (*axes, "tp") if layout.sequence else axes
    layers, params = data.per_device((layers, params), axes)
    if layout.late or not layout.fsdp:
        layers = data.gather(layers, specs["layers"], "dp")
    return layers, data.gather(params, ends(specs), "dp")


# ---- without a pipeline --------------------------------------------------------------------------


def flat(mesh: Mesh, layout: Layout) -> tuple[Mesh, Layout]:
    """Returns the same devices without `pp`, which has become a part of `dp`, under FSDP."""
    if "pp" not in mesh.shape:
        return mesh, layout
    axes = tuple(axis for axis in mesh.axis_names if axis != "pp")
    sizes = {axis: mesh.shape[axis] for axis in axes}
    sizes["dp"] *= mesh.shape["pp"]
    devices = mesh.devices.reshape(*sizes.values())
    plain = replace(layout, fsdp=True, keep=False, late=False, ahead=1, microbatches=1)
    return Mesh(devices, axes, axis_types=(AxisType.Explicit,) * len(axes)), plain
