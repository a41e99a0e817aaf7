"""What Llama 3 405B would take on 8,192, 16,384 and 131,072 GPUs, before anybody pays for it.

    uv run examples/plan.py                 # 16 M tokens a step, as it was trained
    uv run examples/plan.py --tokens 134217728 --devices 131072
    uv run examples/plan.py --check         # published runs beside the planner's word on them

The fastest layouts of each number of GPUs, from a search over all ways to split them; then the two
splits that it was trained with. On 131,072 GPUs a batch of 16 M tokens is two rows for a pipeline
of 128: what is lost there is told by the column "bubble", and by "goodput", for a fault comes every
23 minutes.
"""

import argparse

from xform.sharding import plan

TOKENS = 2**24
SIZES = (8192, 16_384, 131_072)


def as_trained(devices: int) -> plan.Plan:
    """Returns the plan of the split that the paper's table has (arXiv 2407.21783, table 4)."""
    rows = TOKENS // plan.LLAMA_3_405B.length
    split = plan.Layout(
        dp=devices // 128, tp=8, pp=16, microbatches=rows * 128 // devices,
        schedule="interleaved", chunks=8, zero=2, loss="dense",
    )  # fmt: skip
    on = plan.machine("H100", devices)
    return plan.predict(plan.LLAMA_3_405B, on, split, TOKENS, must_fit=False)


def main() -> None:
    """Prints what it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="*", default=SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch, on all devices")
    parser.add_argument("--kind", default="H100", help="A100, H100 or H200")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        print(plan.check_published())
        return
    for devices in given.devices:
        on = plan.machine(given.kind, devices)
        print(f"{plan.search(plan.LLAMA_3_405B, on, given.tokens)}\n")
    for devices in SIZES[:2]:
        print(f"as trained: {as_trained(devices)}\n")


if __name__ == "__main__":
    main()
