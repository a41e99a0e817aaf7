"""train.py under Ray Train, which places its workers, notices when one dies, and starts them again.

    uv run --extra ray examples/train_ray.py --run /shared/runs/one --workers 2 --gpus 8 --tp 8
    uv run --extra ray examples/train_ray.py --run runs/ray --workers 2 --steps 100

Each worker is one process of the run, one to a host, with all of its GPUs; without any (the second
command), each has some virtual CPU devices, and all are on this machine. Flags beside those of
`Cluster` are train.py's. If a worker dies, hangs or fails, Ray starts all of them anew, and they go
on from the newest checkpoint, in a folder that all see.
"""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import ray  # pyright: ignore[reportMissingImports]
import ray.train  # pyright: ignore[reportMissingImports]
import tyro
from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.v2.jax import JaxTrainer  # pyright: ignore[reportMissingImports]
from ray.train.v2.jax.config import JaxConfig  # pyright: ignore[reportMissingImports]

from settings import Config, check, known_of


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What Ray is asked for."""

    workers: int = 2
    """How many processes, one to a host."""
    gpus: int = 0
    """GPUs of each; 0 for CPUs, on this machine."""
    failures: int = 100
    """How many times it is all started again."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """All that the command line asks for."""

    cluster: Annotated[Cluster, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


def work(asked: dict) -> None:
    """Trains, as one of the workers; begins a run or goes on with it, whichever there is."""
    import jax

    import train
    from xform.sharding import cpu_devices
    from xform.train import processes

    context = ray.train.get_context()
    size, rank = context.get_world_size(), context.get_world_rank()
    if not asked["gpus"]:
        jax.config.update("jax_platforms", "cpu")
        cpu_devices(max(1, 8 // size))
    processes.join("auto", size, rank)  # Ray has done it
    config = known_of(asked["config"])
    there = (Path(config.run or ".") / "run.json").exists()
    processes.wait("looked")  # before the first one makes it
    of_ray = dict(processes=size, process=rank, coordinator="auto", resume=there)
    with processes.each_for_itself(train.__file__):
        train.main(dataclasses.replace(config, **of_ray))
    ray.train.report({"steps": config.steps})


def main(asked: Asked) -> None:
    """Has Ray train until the last step."""
    cluster, config = asked.cluster, asked.config
    if not config.run:
        raise ValueError("workers have to find each other's checkpoints: name the run's folder.")
    check(dataclasses.replace(config, processes=cluster.workers, coordinator="auto"))
    run = Path(config.run).absolute()
    config = dataclasses.replace(config, run=str(run))
    if cluster.gpus:
        ray.init()
    else:
        # Ray starts `jax.distributed` for GPUs and TPUs; so it does for what calls itself neither.
        os.environ["JAX_PLATFORMS"] = "cpu"
        ray.init(num_cpus=cluster.workers, include_dashboard=False, _node_ip_address="127.0.0.1")
    resources = {"GPU": cluster.gpus} if cluster.gpus else {"CPU": 1}
    trainer = JaxTrainer(
        work,
        train_loop_config={"config": dataclasses.asdict(config), "gpus": cluster.gpus},
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers, resources_per_worker=resources, use_gpu=bool(cluster.gpus)
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(run),
            failure_config=FailureConfig(max_failures=cluster.failures),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(tyro.cli(Asked))
