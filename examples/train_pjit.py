"""The training of train.py with the partitioner in charge: `jax.jit`, placements, and no rule.

    uv run --extra train examples/train_pjit.py --dp 4 --tp 2

The same model, data and optimiser. Here one says where parameters and rows lie, and XLA finds out
what devices have to send each other, as it sees fit. Losses are those of train.py to 1e-5.
"""

from collections.abc import Iterator
from functools import partial

import jax
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import llama
import train
from xform.sharding import cpu_devices, place, settle, shardings
from xform.train.data import Rows, Source, batch


def automatic(mesh: Mesh) -> Mesh:
    """Returns the same mesh, with axes that are the partitioner's."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def training(config: train.Config, mesh: Mesh, rows: Source) -> Iterator[tuple[dict, float]]:
    """Yields state and loss of each step, on a mesh of automatic axes."""
    optimizer = train.optimizer_for(config)
    placed = shardings(mesh, llama.SPECS)
    # Tokens and labels are split; the numbers of documents, which the mask reads, are everywhere.
    rows_at = shardings(mesh, [P("dp"), P(), P("dp")])

    def mean(params, rows):
        total, labels = llama.loss(params, rows, config.model)
        return total / labels

    @partial(jax.jit, out_shardings=placed)
    def init(key):
        return llama.init(config.model, key)

    @partial(jax.jit, donate_argnums=0)
    def step(state, rows):
        loss, grads = jax.value_and_grad(mean)(state["params"], rows)
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    params = init(jax.random.key(config.seed))
    state = {"params": params, "optimizer": optimizer.init(params)}
    for i in range(config.steps):
        part = batch(rows, i, size=config.batch, seed=config.seed)
        part = Rows(*map(place, part, rows_at))
        state, loss = settle(step(state, part))
        yield state, float(loss)


def main(config: train.Config) -> None:
    """Trains, and prints the loss of every tenth step."""
    train.check(config)
    if config.model.experts:
        raise ValueError("train_pjit.py has no rule for experts: set model.experts=0.")
    mesh = automatic(train.mesh_for(config))
    rows, _ = train.data_for(config, train.tokenizer_for(config))
    for i, (_, loss) in enumerate(training(config, mesh, rows)):
        if i % 10 == 0:
            print(f"step {i + 1:4}  loss {loss:.4f}")


if __name__ == "__main__":
    cpu_devices(8)
    main(train.from_command_line())
