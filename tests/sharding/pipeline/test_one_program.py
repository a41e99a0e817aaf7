import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.sharding.pipeline.models import (
    BATCH,
    SPECS,
    assert_parity,
    first,
    inputs,
    last,
    last_dp,
    mesh_of,
    one_device,
    pairwise,
    placed,
    program,
    stage_tp,
)
from tests.sharding.pipeline.tables import random_table, spelled_out
from xform._hlo import compile_for, read
from xform.jaxpr import walk
from xform.sharding import make_mesh, settle, shardings
from xform.sharding.pipeline import (
    Room,
    Schedule,
    ScheduleError,
    build,
    by_rank,
    by_stage,
    gpipe,
    interleaved,
    one_f_one_b,
    one_program,
    simulate,
    table,
    zb_h1,
    zb_v,
)
from xform.sharding.pipeline._model import full_specs
from xform.sharding.pipeline._table import COLUMNS


@pytest.fixture(autouse=True)
def wide():
    """In float64, where an error that is not rounding has nowhere to hide."""
    with jax.enable_x64(True):
        yield


@cache
def truth(stages: int, microbatches: int):
    given = inputs(stages, microbatches)
    return given, jax.device_get(one_device(*given))


def check(schedule: Schedule, tp: int = 1, dp: int = 1, **options):
    given, wanted = truth(schedule.stages, schedule.microbatches)
    mesh = mesh_of(schedule.ranks, tp, dp)
    found = program(mesh, **options)(schedule, *placed(mesh, schedule, *given))
    assert_parity(found, wanted, schedule)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "tp", "dp"),
    [
        pytest.param("gpipe", 1, 2, 1, 2, marks=pytest.mark.slow),
        pytest.param("1f1b", 4, 3, 2, 1, marks=pytest.mark.slow),
        pytest.param("1f1b", 2, 6, 2, 2, marks=pytest.mark.slow),
        ("zb-h1", 4, 6, 2, 1),
        ("interleaved", 2, 3, 1, 2),
        ("zb-v", 2, 5, 2, 2),
        pytest.param("dualpipe-v", 2, 4, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_device(name, ranks, microbatches, tp, dp):
    check(build(name, ranks, microbatches), tp, dp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches", "tp"), pairwise())
def test_every_builder(name, ranks, microbatches, tp):
    check(build(name, ranks, microbatches), tp)


def random_runs(count: int, microbatches: tuple[int, ...]) -> int:
    """Runs random tables of a few shapes in one room for each; returns how many were compiled."""
    runs = {}
    for seed in range(count):
        chunks, m = 1 + seed % 2, microbatches[seed // 2 % len(microbatches)]
        schedule = random_table(seed, 4, m, chunks=chunks, neighbours=True)
        stages = 4 * chunks
        room = Room(3 * stages * m, *[chunks * m] * 5)
        mesh = mesh_of(4, 2)
        run = runs.setdefault((chunks, m), program(mesh, room=room))
        given, wanted = truth(stages, m)
        found = run(schedule, *placed(mesh, schedule, *given))
        assert_parity(found, wanted, schedule)
    return sum(run.traced for run in runs.values())


def test_random_tables_run_in_programs_compiled_for_others():
    assert random_runs(12, (3,)) <= 3


@pytest.mark.slow
def test_a_thousand_random_tables_take_ten_programs_at_most():
    assert random_runs(1000, (1, 3, 6)) <= 10


@pytest.mark.parametrize(
    "make", [pytest.param(one_f_one_b, marks=pytest.mark.slow), zb_h1], ids=["1f1b", "zb_h1"]
)
def test_memory_and_size_do_not_grow_with_microbatches(make):
    mesh, sizes = mesh_of(4), []
    for microbatches in (8, 32):
        schedule, (given, _) = make(4, microbatches), truth_inputs(4, microbatches)
        compiled = program(mesh).lower(schedule, *placed(mesh, schedule, *given)).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        sizes.append((memory, len(compiled.as_text().splitlines())))
    assert sizes[0] == sizes[1]


def truth_inputs(stages: int, microbatches: int):
    return inputs(stages, microbatches), None


def deep(mesh, make):
    """A program whose stages keep much: eight layers' values, each of the size of what travels."""

    def stage(w, x, batch):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    of = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=shardings(mesh, P(*spec))
    )
    schedule = make(2, 4)
    args = of((2, 8, 256, 256), "pp"), of(()), of((4, 2048, 256))
    run = one_program(stage, lambda s, b: s * b, lambda s, y, b: jnp.sum(y), mesh=mesh)
    program, args = run._ready(schedule, *args)
    return program, args, args[-1].size  # bytes that travel: of four microbatches, four each


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1], ids=["1f1b", "zb_h1"])
def test_no_branch_hands_on_what_stages_keep(make):
    """What passes through a branch may be copied, whether it works or not."""
    program, args, travels = deep(mesh_of(2), make)
    found = [site.eqn for site in walk(program.trace(*args).jaxpr)]
    size = lambda aval: aval.size * aval.dtype.itemsize
    for eqn in found:
        if eqn.primitive.name == "cond":
            assert sum(size(v.aval) for v in eqn.outvars) <= travels


@pytest.mark.slow
@pytest.mark.parametrize("make", [one_f_one_b, zb_h1], ids=["1f1b", "zb_h1"])
def test_an_idle_tick_moves_messages_alone(make):
    """Of the program compiled for an H200: what runs in every tick, beside loops of one turn."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
    program, args, travels = deep(mesh_of(2), make)
    kernels = read(compile_for("H200", program, *args)).kernels
    idle = [k for k in kernels if k.trips == args[0].shape[0] and not k.loops]
    assert len(idle) > 2
    assert 2 * travels < sum(k.bytes for k in idle) < 32 * travels


def test_rooms_are_what_tables_hold():
    """Buffers hold what the verifier counts: of 1F1B R - r activations, whatever the number."""
    for microbatches in (8, 20):
        room = table(one_f_one_b(4, microbatches)).room
        assert (room.late, room.early, room.cross) == (4, 0, 0)
        room = table(zb_h1(4, microbatches)).room
        assert (room.early, room.late, room.cross) == (4, 4, 4)
        assert table(gpipe(4, microbatches)).room.late == microbatches
    assert table(zb_v(2, 8)).room.late == 4
    both = table(one_f_one_b(4, 8)).room | table(gpipe(4, 3)).room
    assert both.late == 4
    assert both.ticks == max(table(s).room.ticks for s in (one_f_one_b(4, 8), gpipe(4, 3)))


def test_slots_are_never_shared():
    """What is written stays until its last reader; checked on the numbers alone."""
    for seed in range(10):
        made = table(random_table(seed, neighbours=True), split=True)
        for rank in range(made.schedule.ranks):
            held = {}
            for row in made.numbers[:, rank]:
                now = dict(zip(COLUMNS, row.tolist(), strict=True))
                if now["f"]:
                    assert now["f_late"] not in held
                    held[now["f_late"]] = (now["f_chunk"], now["f_batch"])
                if now["w"]:
                    assert held.pop(now["w_late"]) == (now["w_chunk"], now["w_batch"])
            assert not held


def test_it_runs_under_jit_and_with_messages_spelled_out():
    schedule = zb_v(2, 3)
    given, wanted = truth(4, 3)
    mesh = mesh_of(2)
    run = program(mesh)
    args = placed(mesh, schedule, *given)
    assert_parity(jax.jit(lambda *args: run(schedule, *args))(*args), wanted, schedule)
    assert_parity(run(spelled_out(schedule), *args), wanted, schedule)


def tree_model(remat: bool):
    """What travels is a tree, weights have integers, and a stage is a scan over two layers."""

    def layer(x, w):
        h, total = x["h"], x["total"]
        h = h + jnp.where(w["skip"] > 0, 0, 1) * jnp.tanh(h @ w["a"].astype(h.dtype))
        return {"h": h, "total": total + jnp.mean(h**2)}, None

    def stage(w, x, batch):
        del batch
        return lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0]

    def first(shared, batch):
        h = batch * shared["gain"]
        return {"h": h, "total": jnp.sum(h) * 0}

    def last(shared, y, batch):
        return jnp.sum(y["h"] * batch) * shared["out"][shared["which"]] + y["total"]

    return stage, first, last


@pytest.mark.parametrize(
    ("make", "remat"),
    [
        (one_f_one_b, False),
        (zb_h1, True),
        pytest.param(one_f_one_b, True, marks=pytest.mark.slow),
        pytest.param(zb_h1, False, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "zb_h1-remat", "1f1b-remat", "zb_h1"],
)
def test_trees_integers_scans_and_small_floats(remat, make):
    stage, first, last = tree_model(remat)
    rng = np.random.default_rng(0)
    weights = {
        "a": jnp.asarray(rng.normal(size=(2, 2, 3, 3)), jnp.bfloat16),
        "skip": np.array([[0, 1], [0, 0]]),
    }
    shared = {"gain": rng.normal(size=()), "out": rng.normal(size=2), "which": np.array(1)}
    batch = rng.normal(size=(3, 2, 3))

    def loss(a, gain, out):
        total = 0.0
        for b in batch:
            ends = {"gain": gain, "out": out, "which": 1}
            x = first(ends, b)
            for s in range(2):
                x = stage({"a": a[s], "skip": weights["skip"][s]}, x, b)
            total = total + last(ends, x, b)
        return total

    # In float64, so that gradients of bfloat16 weights are not rounded; those of one device are.
    wide = jnp.asarray(weights["a"], jnp.float64)
    args = wide, shared["gain"], shared["out"]
    true, (da, dgain, dout) = jax.value_and_grad(loss, (0, 1, 2))(*args)
    mesh = mesh_of(2)
    put = lambda tree, *spec: jax.tree.map(
        lambda x: jax.device_put(x, shardings(mesh, P(*spec))), tree
    )
    run = one_program(stage, first, last, mesh=mesh)
    found = run(make(2, 3), put(weights, "pp"), put(shared), put(batch))
    value, (dw, ds) = jax.device_get(settle(found))
    assert abs(value - true) < 1e-12 * abs(true)
    assert dw["skip"] is None
    assert ds["which"] is None
    assert dw["a"].dtype == np.float32
    # A microbatch's gradient is rounded to bfloat16, the sum is not.
    np.testing.assert_allclose(dw["a"], da, atol=2e-2 * np.abs(da).max())
    assert not np.array_equal(dw["a"], dw["a"].astype(jnp.bfloat16))
    np.testing.assert_allclose(ds["gain"], dgain, rtol=1e-12)
    np.testing.assert_allclose(ds["out"], dout, rtol=1e-12)


def test_what_stages_close_over_keys_and_prints(capfd):
    """Arrays from outside, dropout keys in the batch, a print in the stage."""
    table_of = jnp.arange(12.0).reshape(3, 4)
    keys = jax.random.split(jax.random.key(0), 3)
    values = np.random.default_rng(0).normal(size=(3, 2, 4))
    weights = np.random.default_rng(1).normal(size=(2, 4))

    def model(scale):
        def stage(w, x, batch):
            jax.debug.print("stage {}", x.shape[0] + 0 * w[0])
            keep = jax.random.bernoulli(batch["key"], 0.5, x.shape)
            return jnp.where(keep, x * w[None], 0) + scale * table_of[1][None]

        return stage, lambda s, b: b["x"] * s, lambda s, y, b: jnp.sum(jnp.sin(y))

    def loss(weights, shared, scale):
        stage, first, last = model(scale)
        total = 0.0
        for m in range(3):
            batch = {"key": keys[m], "x": values[m]}
            x = first(shared, batch)
            for w in weights:
                x = stage(w, x, batch)
            total = total + last(shared, x, batch)
        return total

    true = jax.value_and_grad(loss, (0, 1))(weights, 2.0, 0.3)
    mesh, schedule = mesh_of(2), zb_h1(2, 3)
    put = lambda x, *spec: jax.device_put(x, shardings(mesh, P(*spec)))
    args = put(weights, "pp"), put(2.0), {"key": put(keys), "x": put(values)}
    run = one_program(*model(jnp.asarray(0.3)), mesh=mesh)
    capfd.readouterr()
    found = jax.device_get(settle(run(schedule, *args)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("stage 2") == 2 * 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, true)


def refused(error, match, *, stage=stage_tp, first=first, last=last_dp, **options):
    """That a model is refused while it is traced."""
    mesh = mesh_of(2, 2, 2)
    schedule, (given, _) = one_f_one_b(2, 2), truth_inputs(2, 2)
    run = one_program(stage, first, last, mesh=mesh, weights=SPECS, batch=BATCH, **options)
    with pytest.raises(error, match=match):
        run.lower(schedule, *placed(mesh, schedule, *given))


def test_a_collective_over_the_pipeline_is_refused():
    def leaky(w, x, batch):
        return stage_tp(w, x, batch) + 0 * lax.pmean(jnp.sum(x), "pp")

    refused(
        ValueError,
        r"`stage` reaches over `pp`: `psum\w*` at .*test_one_prog",
        stage=leaky,
    )
    nested = lambda w, x, b: lax.fori_loop(0, 2, lambda i, x: lax.ppermute(x, "pp", [(0, 1)]), x)
    refused(ValueError, r"`stage` reaches over `pp`: `ppermute` at", stage=nested)
    around = lambda s, b: first(s, b) + lax.psum(1.0 * lax.axis_index("pp"), "pp")
    refused(ValueError, "`first` reaches over `pp`", first=around)
    over = lambda s, y, b: lax.psum(last_dp(s, y, b), ("pp",))
    refused(ValueError, "`last` reaches over `pp`", last=over)
    experts = lambda w, x, b: stage_tp(w, lax.all_to_all(x, "pp", 0, 0, tiled=True), b)
    refused(ValueError, "`stage` reaches over `pp`: `all_to_all` at", stage=experts)
    index = lambda w, x, b: stage_tp(w, x, b) * (1 + lax.axis_index("pp"))
    refused(
        ValueError, "`axis_index` at .* the index of a rank is not that of a stage", stage=index
    )


def test_activations_that_vary_over_more_are_refused():
    """Cast between stages, they would make gradients as many times too large as tp is."""
    partial_sum = lambda w, x, b: x + jnp.tanh(x @ w["a"]) @ w["b"]
    refused(TypeError, r"V:\(dp,pp,tp\).*which the next stage can't take.*psum", stage=partial_sum)
    cast = lambda w, x, b: lax.pcast(stage_tp(w, x, b), ("tp",), to="varying")
    refused(TypeError, r"for each device of that axis", stage=cast)
    everywhere = lambda s, b: lax.pcast(first(s, b), ("tp",), to="varying")
    refused(
        ValueError, r"`last` returns differs along tp: reduce it there, .*psum", first=everywhere,
        stage=lambda w, x, b: x + stage_tp(w, x, b),
    )  # fmt: skip
    refused(ValueError, r"differs along dp", last=last)


def test_what_varies_along_tp_from_the_start_is_right():
    """Where `first` says so, in a type that AD sees, the gradients are those of one device."""
    mesh, schedule = mesh_of(2, 2), one_f_one_b(2, 3)
    given, wanted = truth(2, 3)
    everywhere = lambda s, b: lax.pcast(first(s, b), ("tp",), to="varying")
    run = one_program(
        stage_tp_of_copies, everywhere,
        lambda s, y, b: lax.pmean(last_dp(s, y, b), "tp"),
        mesh=mesh, weights=SPECS, batch=BATCH,
    )  # fmt: skip
    assert_parity(run(schedule, *placed(mesh, schedule, *given)), wanted, schedule)


def stage_tp_of_copies(w, x, batch):
    return lax.pcast(stage_tp(w, lax.pmean(x, "tp"), batch), ("tp",), to="varying")


def test_other_mistakes_are_named():
    refused(TypeError, r"`last` must return a number.*float64\[2,4\]", last=lambda s, y, b: y)
    refused(TypeError, r"`first`, which travels .* leaves of int\d+", first=lambda s, b: b["ids"])
    refused(
        TypeError, r"which the next stage can't take",
        stage=lambda w, x, b: jnp.concatenate([x, x]),
    )  # fmt: skip
    refused(
        ValueError, r"fit the `room` given: late: 1, and 2 are needed",
        room=Room(20, 9, 9, 9, 1, 0),
    )  # fmt: skip
    mesh = mesh_of(2, 2, 2)
    given = placed(mesh, one_f_one_b(2, 2), *inputs(2, 2))
    run = program(mesh)
    with pytest.raises(
        ValueError, match=r"pp=2, the schedule 4 ranks; .* are 2, .* 4 stages; .* 8 m"
    ):
        run(one_f_one_b(4, 8), *given)
    with pytest.raises(ScheduleError, match="rank 1, step 0: `1B0`"):
        run(Schedule.from_text("F0 F1 B0 B1\nB0 F0 F1 B1"), *given)
    with pytest.raises(ValueError, match=r"as many stages on every rank, .* own \[2, 1\]"):
        table(Schedule.from_text("0F0 1F0 1B0 0B0\n2F0 2B0"))
    with pytest.raises(ValueError, match=r"stage 0 is on rank 0, stage 1 on 2"):
        table(Schedule([["0F0", "0B0"], ["2F0", "2B0"], ["1F0", "1B0"], ["3F0", "3B0"]]))
    everywhere = {"a": P(None, None, "tp"), "b": P(None, "tp"), "scale": P("pp")}
    for options, name in (
        ({"weights": everywhere}, "weights"),
        ({"batch": BATCH | {"ids": P("dp")}}, "batch"),
        ({"batch": BATCH | {"mask": P(None, "pp")}}, "batch"),
        ({"shared": {"codes": P(None, "pp"), "bias": P()}}, "shared"),
    ):
        specs = {"weights": SPECS, "batch": BATCH, "shared": P(), **options}
        wrong = one_program(stage_tp, first, last_dp, mesh=mesh, **specs)
        places = (specs["weights"], full_specs(specs["shared"], given[1]), specs["batch"])
        moved = jax.tree.map(jax.device_put, given, shardings(mesh, places))
        with pytest.raises(ValueError, match=f"specs must be `{name}=P"):
            wrong(one_f_one_b(2, 2), *moved)
    flat = make_mesh(dp=4, tp=2)
    with pytest.raises(ValueError, match=r"needs a mesh axis `pp`; found \('dp', 'tp'\)"):
        program(flat)


@pytest.mark.slow
def test_measured_times_tell_a_slow_stage():
    """The third of four stages multiplies matrices in its forward pass."""

    def stage(w, x, batch):
        del batch
        big = lambda x: x + 1e-9 * jnp.sum(jnp.linalg.matrix_power(jnp.full((600, 600), x[0]), 16))
        return lax.cond(w > 1, big, lambda x: x, x * w)

    mesh, schedule = mesh_of(2), zb_v(2, 2)
    put = lambda x, *spec: jax.device_put(x, shardings(mesh, P(*spec)))
    weights = by_rank(np.array([1.0, 1.0, 2.0, 1.0]), schedule)
    run = one_program(stage, lambda s, b: b * s, lambda s, y, b: jnp.sum(y), mesh=mesh)
    times = run.measure(schedule, put(weights, "pp"), put(1.0), put(np.full((2, 2), 1e-3)))
    forward = np.asarray(times.F)
    assert forward.shape == (4,)
    assert forward.argmax() == 2
    assert times.send > 0
    assert simulate(schedule, times, lockstep=True).end > 2 * forward[2]


def test_by_rank_and_back():
    for schedule in (gpipe(4, 1), interleaved(2, 2, 3), zb_v(3, 2)):
        tree = {"x": np.arange(schedule.stages), "y": np.arange(2 * schedule.stages).reshape(-1, 2)}
        there = by_rank(tree, schedule)
        own = iter(there["x"])
        assert [[next(own) for _ in row] for row in schedule.stages_of] == [
            list(row) for row in schedule.stages_of
        ]
        back = by_stage(there, schedule)
        assert all(np.array_equal(back[key], tree[key]) for key in tree)


def test_collectives_are_those_that_move_activations():
    """A V sends four ways, a line two; nothing else crosses ranks inside the loop."""
    for schedule, count in ((one_f_one_b(4, 4), 2), (zb_v(4, 4), 4)):
        mesh = mesh_of(4)
        given = inputs(schedule.stages, 4)
        text = program(mesh).lower(schedule, *placed(mesh, schedule, *given)).as_text()
        assert len(re.findall(r"stablehlo.collective_permute", text)) == count
