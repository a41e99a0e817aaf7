"""What a step does with gradients, and the state that it begins with."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

import hugging_face
import llama
import pipelined
from parallel import Layout
from xform import all_finite
from xform.sharding import place, shardings
from xform.sharding.pipeline import Schedule


def optimizer(peak: float, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps, peak / 10)
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def partitioned(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimiser whose products may sum over dims that a mesh splits, as Muon's do.

    JAX refuses them, since nobody says where their results are to lie. Here XLA's partitioner does,
    and moves what it has to: that is declared nowhere, and may be much.
    """

    def update(updates, state, params=None):
        as_they_lie = jax.tree.map(lambda x: jax.typeof(x).sharding, (updates, state))
        return auto_axes(out_sharding=as_they_lie)(optimizer.update)(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def first_state(
    model: llama.Config,
    mesh: Mesh,
    layout: Layout,
    schedule: Schedule | None,
    optimizer: optax.GradientTransformation,
    seed: int = 0,
    weights: str | None = None,
) -> dict:
    """Returns parameters, fresh or of a folder, and the optimiser's state of them, on the mesh."""
    if weights is None:
        placed = pipelined.placement(layout, model, mesh, schedule)
        init = jax.jit(partial(pipelined.first_params, model, schedule), out_shardings=placed)
        params = init(jax.random.key(seed))
    else:
        placed = pipelined.rest_placement(layout, model, mesh, schedule)
        params = {"params": hugging_face.load(weights, placed)[1]}
        params = pipelined.in_ranks(params, schedule)["params"]
    state = optimizer.init(params)
    # Moments lie as their parameters do. What has no parameter's shape is on one device, so far.
    there = lambda x: isinstance(x.sharding, NamedSharding)
    on_mesh = lambda x: x if there(x) else place(x, shardings(mesh, P()))
    state = jax.tree.map(on_mesh, state)
    try:
        jax.eval_shape(optimizer.update, params, state, params)
    except Exception as error:
        error.add_note(
            "The optimiser can't update these parameters on this mesh. If it sums over dims that "
            "the mesh splits, as Muon does, wrap it in `updates.partitioned`."
        )
        raise
    return {"params": params, "optimizer": state}


def update_of(optimizer: optax.GradientTransformation) -> Callable:
    """Returns `update(state, loss, grads) -> state, loss`, which reuses the state's memory.

    What is not finite changes nothing, so that there is still something to look at. XLA makes one
    loop of each parameter's update, that writes over the old state; a kernel of `fuse` has results
    of its own, and donated memory would take a copy. It is a program
    of its own: as part of the one that makes gradients, XLA's CPU code for it takes ten times
    longer.
    """

    @partial(jax.jit, donate_argnums=(0,))
    def update(state, loss, grads):
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        good = all_finite((loss, grads))
        new = {"params": params, "optimizer": optimizer_state}
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)
        return kept, jnp.where(good, loss, jnp.nan)

    return update
