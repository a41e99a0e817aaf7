"""What steps take: the arithmetic, its order, and the simulator's word on pipelines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.plan.shapes import LONG, SMALL, built, cases, predict
from xform.sharding import plan
from xform.sharding.pipeline import Times, build, simulate, verify
from xform.sharding.plan._compute import passes, product
from xform.sharding.plan._layout import Layout, layers_of_stages
from xform.sharding.plan._messages import Group, collective, rate, send
from xform.sharding.plan._search import held_of
from xform.sharding.plan._time import in_flight, pipelined, work_of

FASTER = ("bandwidth", "network", "nic", "product", "stream", "link", "attention", "launch", "hop")


def better(machine: plan.Machine, what: str) -> plan.Machine:
    """The machine with one thing better."""
    device, rates, fabric = machine.device, machine.rates, machine.fabric
    match what:
        case "bandwidth" | "network":
            device = replace(device, **{what: 2 * getattr(device, what)})
        case "nic":
            fabric = replace(fabric, nic=2 * fabric.nic)
        case "hop":
            fabric = replace(fabric, link_hop=0.0, network_hop=0.0)
        case "launch":
            rates = replace(rates, launch=0.0)
        case "attention":
            rates = replace(rates, attention=(1.0, 1.0))
        case _:
            rates = replace(rates, **{what: 1.0})
    return replace(machine, device=device, rates=rates, fabric=fabric)


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(FASTER))
def test_what_is_faster_never_makes_a_step_slower(case, what):
    model, machine, layout, tokens = built(case)
    before = predict(model, machine, layout, tokens).seconds
    assert predict(model, better(machine, what), layout, tokens).seconds <= before * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_step_is_its_parts_and_its_bubble_the_simulators(case):
    model, machine, layout, tokens = built(case)
    found = predict(model, machine, layout, tokens)
    assert sum(found.step.parts.values()) == pytest.approx(found.seconds)
    assert all(seconds >= 0 for seconds in found.step.parts.values())
    work = work_of(model, layout, passes(model, machine, layout, tokens))
    options = {"chunks": layout.chunks} if layout.schedule == "interleaved" else {}
    table = build(layout.schedule, layout.pp, layout.microbatches, **options)
    timeline = simulate(table, work.times)
    assert found.bubble == pytest.approx(timeline.bubble, abs=1e-9)
    assert found.step.bubble == pytest.approx(timeline.end * timeline.bubble, abs=1e-12)
    # What the mean rank does otherwise is what the simulator's ranks do; then come sums and update.
    assert found.seconds >= timeline.end * (1 - 1e-9)
    rest = sum(timeline.busy) / layout.pp
    assert found.seconds - found.step.bubble >= rest * (1 - 1e-9)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 1)],
)
@settings(max_examples=4, deadline=None)
@given(
    ranks=st.integers(2, 4),
    microbatches=st.integers(9, 21),
    last=st.floats(0.5, 3),
    wait=st.floats(0, 0.5),
)
def test_many_microbatches_are_extrapolated_exactly(
    schedule, chunks, lockstep, ranks, microbatches, last, wait
):
    layout = Layout(
        pp=ranks, microbatches=microbatches, schedule=schedule, chunks=chunks, lockstep=lockstep
    )
    forward = [1.0] * (layout.stages - 1) + [last]
    times = Times(F=forward, I=1.1, W=0.9, send=wait)
    options = {"chunks": chunks} if schedule == "interleaved" else {}
    table = build(schedule, ranks, microbatches, **options)
    whole, found = simulate(table, times, lockstep=lockstep), pipelined(layout, times)
    assert found.end == pytest.approx(whole.end, rel=1e-6)
    assert found.bubble == pytest.approx(whole.bubble, abs=1e-6)
    assert found.in_flight == verify(table).in_flight


def test_bubble_of_equal_stages_is_the_books():
    """(R - 1) / (V M) of the work: arXiv 2104.04473, section 2.2."""
    for chunks, schedule in ((1, "1f1b"), (4, "interleaved")):
        layout = Layout(pp=4, microbatches=8, schedule=schedule, chunks=chunks)
        found = pipelined(layout, Times(F=1.0, I=1.0, W=1.0))
        assert found.bubble / (1 - found.bubble) == pytest.approx(3 / (8 * chunks))


@given(st.integers(1, 130), st.integers(1, 130))
def test_layers_of_stages_add_up_and_ends_have_the_fewest(layers, stages):
    counts = layers_of_stages(layers, stages)
    assert sum(counts) == layers
    assert len(counts) == stages
    assert max(counts) == counts[(stages - 1) // 2]
    if stages <= layers:
        assert max(counts) - min(counts) <= 1


def test_products_are_slower_where_they_are_thin_and_never_beat_the_sustained_rate():
    one = plan.machine("H200", 1)
    flops = lambda m, k, n: 2 * m * k * n / product(m, k, n, one)
    best = one.peak() * one.rates.product
    assert 0.95 * best < flops(16_384, 16_384, 16_384) < best
    assert flops(8192, 512, 8192) < 0.9 * flops(8192, 8192, 8192)
    # One row: bound by the matrix that is read.
    bytes_of_matrix = 2 * 8192 * 8192
    least = bytes_of_matrix / (one.device.bandwidth * one.rates.stream)
    assert product(1, 8192, 8192, one) == pytest.approx(least, rel=0.01)


def test_rings_by_where_devices_lie():
    machine = plan.machine("H100", 65_536, link=1.0, network=1.0, pod=4096, oversubscription=7.0)
    in_node = rate(Group(8, 1), machine)[0]
    assert in_node == machine.device.network
    # One member in a node has one port; eight have eight, up to the links' own rate.
    assert rate(Group(16, 8), machine)[0] == machine.fabric.nic
    assert rate(Group(64, 1), machine)[0] == min(8 * machine.fabric.nic, in_node)
    assert rate(Group(64, 4), machine)[0] == 2 * machine.fabric.nic
    # A pod has 32 members of this group: one in 32 crosses, and a seventh may.
    assert rate(Group(512, 128), machine)[0] == machine.fabric.nic
    # Of this one a pod has 4: one in four crosses.
    assert rate(Group(64, 1024), machine)[0] == pytest.approx(machine.fabric.nic * 4 / 7)


def test_collectives_by_hand():
    machine = plan.machine("H100", 16, link=0.5, link_hop=1e-6)
    n, nbytes = 4, 1e9
    one = (n - 1) * (1e-6 + nbytes / n / (machine.device.network * 0.5))
    assert collective("all-gather", nbytes, Group(n, 1), machine) == pytest.approx(one)
    assert collective("all-reduce", nbytes, Group(n, 1), machine) == pytest.approx(2 * one)
    assert collective("all-gather", nbytes, Group(1, 1), machine) == 0
    assert send(1e9, 1, machine) < send(1e9, 8, machine)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(("all-gather", "all-reduce")), st.integers(1, 512), st.floats(1, 1e10))
def test_messages_grow_with_their_bytes(kind, n, nbytes):
    machine = plan.machine("H100", 131_072)
    group = Group(n, 128)
    assert collective(kind, nbytes, group, machine) <= collective(kind, 2 * nbytes, group, machine)


def test_recompute_costs_a_forward_pass():
    machine = plan.machine("H200", 1)
    keep, again = (Layout(recompute=how) for how in ("none", "full"))
    a, b = (passes(SMALL, machine, layout, 4 * SMALL.length) for layout in (keep, again))
    assert b.backward.total == pytest.approx(a.backward.total + a.forward.total)


def test_overlap_hides_messages():
    machine = plan.machine("H100", 16)
    shown = Layout(dp=16, zero=3, overlap=())
    hidden = replace(shown, overlap=("dp",))
    a, b = (predict(LONG, machine, layout, 16 * LONG.length) for layout in (shown, hidden))
    assert b.step.communication < a.step.communication
    assert b.step.compute == a.step.compute


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_in_flight_of_the_search_is_the_verifiers(schedule, chunks):
    for pp in (2, 3, 4):
        for m in (1, 2, 3, 4, 5, 8, 12):
            layout = Layout(pp=pp, microbatches=m, schedule=schedule, chunks=chunks)
            exact = in_flight(layout)
            # Built for a multiple of the ranks, and cut: never more than what is said.
            assert all(a >= b for a, b in zip(held_of(layout), exact, strict=True))
            if m % pp == 0:
                assert held_of(layout) == exact
