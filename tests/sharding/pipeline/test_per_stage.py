import threading
from functools import partial

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
    stage_tp,
)
from tests.sharding.pipeline.tables import random_table
from xform.sharding import make_mesh, settle, shardings
from xform.sharding.pipeline import (
    Schedule,
    ScheduleError,
    build,
    by_rank,
    one_f_one_b,
    per_stage,
    simulate,
    zb_h1,
    zb_v,
)


@pytest.fixture(autouse=True)
def wide():
    """In float64, where an error that is not rounding has nowhere to hide."""
    with jax.enable_x64(True):
        yield


def program(mesh, *, stage=stage_tp, last=last_dp):
    return per_stage(stage, first, last, mesh=mesh, weights=SPECS, batch=BATCH)


def check(schedule: Schedule, tp: int = 1, dp: int = 1):
    given = inputs(schedule.stages, schedule.microbatches)
    mesh = mesh_of(schedule.ranks, tp, dp)
    args = placed(mesh, schedule, *given)
    found = program(mesh)(schedule, *args)
    assert_parity(found, one_device(*given), schedule)
    place = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert place(found[1]) == place(args[:2])


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "tp", "dp"),
    [("1f1b", 2, 3, 2, 2), ("zb-h1", 4, 2, 2, 1), ("zb-v", 2, 5, 1, 2), ("dualpipe-v", 2, 4, 2, 1)],
)
def test_loss_and_every_gradient_are_those_of_one_device(name, ranks, microbatches, tp, dp):
    check(build(name, ranks, microbatches), tp, dp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches", "tp"), pairwise())
def test_every_builder(name, ranks, microbatches, tp):
    check(build(name, ranks, microbatches), tp)


def test_a_stage_may_be_on_any_rank_and_programs_are_made_once():
    mesh, run = mesh_of(3), None
    for seed in range(3):
        schedule = random_table(seed, 3, 2, chunks=2)
        given = inputs(6, 2)
        run = run or program(mesh)
        args = placed(mesh, schedule, *given)
        assert_parity(run(schedule, *args), one_device(*given), schedule)
    assert len(run._programs) <= 2


def test_operands_are_left_alone_and_a_second_run_is_the_same():
    mesh, schedule = mesh_of(2, 2), zb_h1(2, 3)
    args = placed(mesh, schedule, *inputs(2, 3))
    run = program(mesh)
    one, two = (jax.device_get(settle(run(schedule, *args))) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.array_equal(a, b)


def test_measured_times_tell_a_slow_stage():
    """The second of four stages multiplies matrices in its forward pass."""

    def stage(w, x, batch):
        del batch
        big = lambda x: x + 1e-9 * jnp.sum(jnp.linalg.matrix_power(jnp.full((600, 600), x[0]), 16))
        return lax.cond(w > 1, big, lambda x: x, x * w)

    mesh, schedule = mesh_of(2), zb_v(2, 3)
    put = lambda x, *spec: jax.device_put(x, shardings(mesh, P(*spec)))
    weights = by_rank(np.array([1.0, 2.0, 1.0, 1.0]), schedule)
    run = per_stage(stage, lambda s, b: b * s, lambda s, y, b: jnp.sum(y), mesh=mesh)
    times = run.measure(schedule, put(weights, "pp"), put(1.0), put(np.full((3, 2), 1e-3)))
    forward, backward, inputs, weights = map(np.asarray, (times.F, times.B, times.I, times.W))
    assert {of.shape for of in (forward, backward, inputs, weights)} == {(4,)}
    assert forward.min() > 0 < times.send
    assert forward[1] > 2 * forward.min()  # any of the others may have met a busy moment
    assert simulate(schedule, times).end > 3 * forward[1]


def with_calls(call):
    """Two stages that call the host in their forward pass: with stage and microbatch."""

    def stage(w, x, batch):
        at = [x.astype(jnp.int32) for x in (lax.stop_gradient(w), batch["m"])]
        number = jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.int32), *at)
        return x * jnp.where(w > 0, 2.0, 3.0) + number

    mesh = mesh_of(2)
    put = lambda x, *spec: jax.device_put(x, shardings(mesh, P(*spec)))
    run = per_stage(stage, lambda s, b: s * b["m"], lambda s, y, b: y, mesh=mesh)
    return partial(run, one_f_one_b(2, 2), put(np.arange(2.0), "pp"), put(1.0), {"m": put(MS)})


MS = np.array([0.0, 1.0])


def test_a_program_that_waits_for_the_host_holds_up_its_own_rank_alone():
    """The second forward pass of one rank and the first one of the other wait for each other."""
    both, met = threading.Barrier(2), set()

    def call(stage, m):
        if stage + m == 1:
            met.add(both.wait(timeout=20))
        return np.int32(0)

    loss, (_, shared) = jax.device_get(with_calls(call)())
    assert loss == shared == 6 * MS.sum()
    assert met == {0, 1}


def test_a_rank_that_fails_ends_the_run_for_all():
    def call(stage, m):
        if stage == 1:
            raise RuntimeError("no luck")
        return np.int32(0)

    with pytest.raises(Exception, match="no luck"):
        with_calls(call)()
    with_calls(lambda stage, m: np.int32(0))()  # nor is a thread left that waits


def test_mistakes_are_named():
    mesh = mesh_of(2, 2)
    args = placed(mesh, one_f_one_b(2, 2), *inputs(2, 2))
    with pytest.raises(ScheduleError, match="circle"):
        program(mesh)(Schedule.from_text("F1 B1 F0 B0\nF0 B0 F1 B1"), *args)
    with pytest.raises(ValueError, match=r"needs arrays on its mesh; found float64\[2,4,6\]"):
        program(mesh)(one_f_one_b(2, 2), *jax.device_get(args))
    with pytest.raises(ValueError, match=r"pp=2, the schedule 4 ranks"):
        program(mesh)(one_f_one_b(4, 8), *args)
    with pytest.raises(ValueError, match="every rank needs as many stages"):
        program(mesh)(Schedule.from_text("0F0 1F0 1B0 0B0\n2F0 2B0"), *args)
    over = lambda w, x, b: stage_tp(w, lax.pmean(x, "pp"), b)
    with pytest.raises(ValueError, match="`stage` reaches over `pp`"):
        program(mesh, stage=over)(one_f_one_b(2, 2), *args)
    with pytest.raises(ValueError, match="differs along dp"):
        program(mesh, last=last)(one_f_one_b(2, 2), *args)
    flat = make_mesh(dp=4, tp=2)
    with pytest.raises(ValueError, match=r"needs a mesh axis `pp`; found \('dp', 'tp'\)"):
        program(flat)
