"""What a step does with gradients, and the state that it begins with."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

import hugging_face
import llama
import pipelined
from parallel import Layout
from xform import all_finite, fuse
from xform.sharding import place, shardings
from xform.sharding.pipeline import Schedule


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW under a warm-up and a cosine, with gradients clipped to norm 1.

    `init` and `update` are those of an `optax.GradientTransformation`. `step` does the same to the
    same state and to the parameters, by kernels.

    Attributes:
      peak: the learning rate after the warm-up, a tenth of the steps; at the end a tenth of it.
      steps: how many there will be.
      weight_decay: of all parameters.
      slowness: of both moments.
    """

    peak: float
    steps: int
    weight_decay: float
    slowness: tuple[float, float] = (0.9, 0.98)

    @cached_property
    def rate(self) -> optax.Schedule:
        peak, steps = self.peak, self.steps
        return optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps, peak / 10)

    @cached_property
    def chain(self) -> optax.GradientTransformation:
        b1, b2 = self.slowness
        adamw = optax.adamw(self.rate, b1, b2, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @property
    def init(self) -> Callable:
        return self.chain.init

    @property
    def update(self) -> Callable:
        return self.chain.update

    def step(self, state: dict, grads, good) -> dict:
        """Returns the state after a step, or if it is not `good` as it was."""
        clipping, (adam, decaying, scaling) = state["optimizer"]
        count = optax.safe_increment(adam.count)
        sizes = jnp.maximum(optax.tree.norm(grads), 1), self.rate(scaling.count), self.weight_decay
        unbiased = [1 - b**count for b in self.slowness]
        each = partial(adamw, slowness=self.slowness)
        leaves, tree = jax.tree.flatten(state["params"])
        arrays = zip(leaves, *map(jax.tree.leaves, (adam.mu, adam.nu, grads)), strict=True)
        new = [each(*own, *sizes, *unbiased, good) for own in arrays]
        params, mu, nu = map(tree.unflatten, zip(*new, strict=True))
        kept = lambda new, old: jnp.where(good, new, old)
        adam = adam._replace(count=kept(count, adam.count), mu=mu, nu=nu)
        scaling = scaling._replace(count=kept(optax.safe_increment(scaling.count), scaling.count))
        return {"params": params, "optimizer": (clipping, (adam, decaying, scaling))}


@partial(fuse, donate_argnums=(0, 1, 2))
def adamw(param, mean, square, grad, norm, rate, decay, unbiased1, unbiased2, good, *, slowness):
    """Returns an array and its moments after a step; a kernel that writes over the old ones."""
    b1, b2 = slowness
    old = [x.astype(jnp.float32) for x in (param, mean, square)]
    p, m, v = old
    g = grad.astype(jnp.float32) / norm
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    p -= rate * (m / unbiased1 / (jnp.sqrt(v / unbiased2) + 1e-8) + decay * p)
    new = [jnp.where(good, x, before) for x, before in zip((p, m, v), old, strict=True)]
    return [x.astype(y.dtype) for x, y in zip(new, (param, mean, square), strict=True)]


def optimizer(peak: float, steps: int, weight_decay: float) -> AdamW:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    return AdamW(peak, steps, weight_decay)


type Optimizer = optax.GradientTransformation | AdamW


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
    optimizer: Optimizer,
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


def update_of(optimizer: Optimizer) -> Callable:
    """Returns `update(state, loss, grads) -> state, loss`, which reuses the state's memory.

    What is not finite changes nothing, so that there is still something to look at. On a GPU AdamW
    is one kernel of `fuse` for each array. A CPU's loop of `fuse` writes over nothing, and donated
    memory would take a copy: there XLA makes the loops, as it does of all other optimisers. It is a
    program of its own: as part of the one that makes gradients, XLA's CPU code for it takes ten
    times longer.
    """

    def plain(state, grads, good):
        updates, rest = optimizer.update(grads, state["optimizer"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "optimizer": rest}
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)

    kernels = optimizer.step if isinstance(optimizer, AdamW) else plain

    @partial(jax.jit, donate_argnums=(0,))
    def update(state, loss, grads):
        good = all_finite((loss, grads))
        kept = jax.lax.platform_dependent(state, grads, good, cuda=kernels, default=plain)
        return kept, jnp.where(good, loss, jnp.nan)

    return update
