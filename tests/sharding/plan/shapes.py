"""Models, machines and layouts that tests of the planner share."""

from hypothesis import strategies as st

from xform.sharding import plan

SMALL = plan.Model(8, 1024, 16, 8, 64, 4096, 32_000, 2048, name="small")
LONG = plan.Model(32, 4096, 32, 8, 128, 14_336, 128_256, 32_768, name="8B, 32k")


# What a layout is drawn from: plain values, since `built` checks its types, at random.
cases = lambda: st.fixed_dictionaries(
    {
        "model": st.sampled_from((0, 1)),
        "kind": st.sampled_from(("A100", "H100", "H200")),
        "rows": st.sampled_from((1, 2)),
        **{axis: st.sampled_from((1, 2, 4)) for axis in ("dp", "tp", "cp", "pp")},
        "microbatches": st.integers(1, 9),
        "pipeline": st.sampled_from((("1f1b", 1), ("gpipe", 1), ("interleaved", 2))),
        "zero": st.sampled_from((0, 1, 2, 3)),
        "sequence": st.booleans(),
        "recompute": st.sampled_from(("none", "attention", "full")),
        "loss": st.sampled_from(("fused", "dense")),
        "precision": st.sampled_from(("policy", "fused", "mixed", "mixed16")),
        "overlap": st.sampled_from(((), ("dp",), ("dp", "pp"), ("dp", "pp", "tp", "cp"))),
    }
)


def built(case: dict) -> tuple[plan.Model, plan.Machine, plan.Layout, int]:
    """A model, a machine, a layout that can run on it, and its tokens."""
    case = dict(case)
    model, kind, rows = (SMALL, LONG)[case.pop("model")], case.pop("kind"), case.pop("rows")
    schedule, chunks = case.pop("pipeline")
    if case["pp"] == 1:
        schedule, chunks = "1f1b", 1
    layout = plan.Layout(**case, schedule=schedule, chunks=chunks)
    tokens = layout.dp * layout.microbatches * rows * model.length
    return model, plan.machine(kind, layout.devices), layout, tokens


def predict(model, machine, layout, tokens) -> plan.Plan:
    return plan.predict(model, machine, layout, tokens, must_fit=False)
