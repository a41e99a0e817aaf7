"""The steps of train.py: the programs that make them, where they begin, and where numbers break."""

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import parallel
import pipelined
import updates
from settings import Config
from xform import explain, numerics
from xform.sharding import settle, shardings
from xform.sharding.pipeline import Schedule
from xform.train import replay
from xform.train.capture import Capture
from xform.train.clock import Clock
from xform.train.data import Rows, Source, batch, batches, rows_here
from xform.train.recovery import batch_number


def schedule_for(config: Config) -> Schedule | None:
    """Returns the pipeline's schedule; None where there is no pipeline."""
    if config.pp is None:
        return None
    return pipelined.schedule_of(config.schedule or "1f1b", config.pp, config.microbatches)


def explained(f: Callable, file: str) -> Callable:
    """Returns `f`, which at its first call writes to a file what its compiled program runs."""

    def call(*args):
        if not Path(file).exists():
            explain(f)(*args).save(file)
        return f(*args)

    return call


def gradients_for(config: Config, mesh: Mesh) -> Callable:
    """Returns the loss and the gradients of parameters and rows, over the mesh."""
    c = config
    return pipelined.gradients(
        c.model, mesh, c.layout, c.precision, schedule_for(c), executor=c.executor
    )


def optimizer_for(config: Config) -> updates.Optimizer:
    """Returns AdamW under a warm-up and a cosine, with gradients clipped to norm 1."""
    return updates.optimizer(config.learning_rate, config.steps, config.weight_decay)


def first_state(config: Config, mesh: Mesh) -> dict:
    """Returns the parameters to begin with and the optimiser's state of them, all on the mesh."""
    schedule, optimizer = schedule_for(config), optimizer_for(config)
    return updates.first_state(
        config.model, mesh, config.layout, schedule, optimizer, config.seed, config.weights
    )


@lru_cache(maxsize=1)  # so that a run that goes back does not compile again
def programs(config: Config, mesh: Mesh) -> tuple[Callable, Callable]:
    """Returns what makes loss and gradients, and what updates the state with them."""
    grads_of = gradients_for(config, mesh)
    if config.explain:
        Path(config.explain).unlink(missing_ok=True)
        grads_of = explained(grads_of, config.explain)
    return grads_of, updates.update_of(optimizer_for(config))


def training(
    config: Config,
    mesh: Mesh,
    rows: Source,
    saved: dict | None = None,
    done: int = 0,
    *,
    skipped: Collection[int] = (),
    clock: Clock | None = None,
    capture: Capture | None = None,
) -> Iterator[tuple[dict, float]]:
    """Yields state and loss of each step after those `done`; the next step reuses its memory.

    It begins with the state that was saved then, or with a fresh one. A loss that is not finite has
    changed nothing.

    Args:
      skipped: Batches that are left out.
      clock: Is told what is being done.
      capture: Records a profile of some steps.
    """
    grads_of, update = programs(config, mesh)
    clock, capture = clock or Clock(), capture or Capture("", None)
    state = first_state(config, mesh) if saved is None else saved
    drawn: dict[str, Any] = dict(size=config.batch, seed=config.seed)
    here = rows_here(shardings(mesh, parallel.specs_of_rows(mesh)), (config.batch, config.length))
    number = partial(batch_number, skipped=skipped)
    with closing(batches(rows, done, number=number, here=here, **drawn)) as parts:
        for i in range(done, config.steps):
            making = "compile" if clock.now == "start" else "step"
            clock.enter("data", i + 1)
            placed = parallel.place_rows(next(parts), mesh)
            if config.replay_every and (i + 1) % config.replay_every == 0:
                clock.enter("replay")
                of = lambda rows: settle(grads_of(state["params"], parallel.place_rows(rows, mesh)))  # noqa: B023
                replay.check(of, batch(rows, number(i), **drawn), mesh.shape["dp"], i + 1)
            clock.enter(making)
            with capture.step(i + 1):
                loss, grads = settle(grads_of(state["params"], placed))
                state, loss = settle(update(state, loss, grads))
                loss = float(loss)
            clock.enter("other")
            yield state, loss


def origin(config: Config, mesh: Mesh, params: dict, rows: Rows) -> numerics.NonFinite:
    """Returns where numbers first were not finite, of parameters in training and of rows."""
    mesh, layout = pipelined.flat(mesh, config.layout)
    grads = parallel.gradients(config.model, mesh, layout, config.precision)
    params = pipelined.at_rest(params, schedule_for(config))
    params = jax.device_put(params, parallel.placement(layout, config.model, mesh))
    return numerics.find_nonfinite(grads)(params, parallel.place_rows(rows, mesh))
