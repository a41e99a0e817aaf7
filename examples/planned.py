"""A layout of parallel.py and pipelined.py in the words of `xform.sharding.plan`."""

from collections.abc import Mapping

from parallel import Layout
from xform.sharding import plan
from xform.sharding.pipeline import BUILDERS, Schedule


def layout_of(
    axes: Mapping[str, int], layout: Layout, schedule: Schedule | None, *, fused: bool = False
) -> plan.Layout:
    """Returns what the planner calls it; `fused`: with kernels between products, as on Hopper.

    Parameters are float32, and cast where they are used. Without `fsdp` gradients are summed once,
    after all else; with it, messages run beside layers, which are computed once more on the way
    back. Of a pipeline, one program a stage is meant, and messages run beside its passes.

    Raises:
      ValueError: An axis that the planner does not know, as `ep`.
    """
    known = ("dp", "pp", "cp", "tp")
    if unknown := [f"{axis}={n}" for axis, n in axes.items() if axis not in known and n > 1]:
        raise ValueError(
            f"layout_of: {' and '.join(unknown)}: the planner knows {', '.join(known)}, and no "
            "experts that are dealt out; leave it out."
        )
    names = {build(2, 2).name: name for name, build in BUILDERS.items()}
    pipeline = {}
    if schedule is not None:
        chunks = schedule.stages // schedule.ranks
        kind = "interleaved" if schedule.name.startswith("interleaved") else names[schedule.name]
        pipeline = dict(
            schedule=kind, chunks=chunks if kind == "interleaved" else 1,
            microbatches=schedule.microbatches,
        )  # fmt: skip
    sizes = {axis: axes.get(axis, 1) for axis in known}
    beside = ("pp",) + (("dp",) if layout.fsdp else ()) + (("tp",) if layout.overlap else ())
    return plan.Layout(
        **{"microbatches": layout.microbatches, **sizes, **pipeline},
        zero=3 if layout.fsdp else 0,
        sequence=layout.sequence,
        recompute="full" if layout.fsdp else "none",
        precision="fused" if fused else "policy",
        overlap=beside,
    )
