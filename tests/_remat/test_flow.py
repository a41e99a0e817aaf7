"""The maximum flow, beside all cuts there are."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from xform._remat._flow import SINK, SOURCE, Network


@st.composite
def networks(draw):
    """Edges of a small network; capacities beyond 64 bits among them."""
    n = draw(st.integers(2, 7))
    node = st.integers(0, n - 1)
    room = st.one_of(st.integers(0, 9), st.just(1 << 130))
    return n, draw(st.lists(st.tuples(node, node, room), max_size=20))


def crossing(edges, sink_side):
    return sum(c for a, b, c in edges if a not in sink_side and b in sink_side)


def solved(n, edges):
    network = Network()
    for _ in range(n - 2):
        network.node()
    for edge in edges:
        network.edge(*edge)
    return network.cut()


@given(networks())
def test_flow_is_the_least_cut_and_the_cut_nearest_to_the_sink(case):
    n, edges = case
    flow, side = solved(n, edges)
    others = [v for v in range(n) if v not in (SOURCE, SINK)]
    sides = [{SINK, *some} for k in range(n - 1) for some in itertools.combinations(others, k)]
    least = min(crossing(edges, s) for s in sides)
    assert flow == least == crossing(edges, side)
    nearest = set.intersection(*(s for s in sides if crossing(edges, s) == least))
    assert side == nearest


@given(networks())
def test_the_same_network_has_the_same_cut(case):
    assert solved(*case) == solved(*case)


def test_long_chain_needs_no_recursion():
    n = 20_000
    chain = [SOURCE, *range(2, n), SINK]
    edges = [(a, b, 3 + (i == n // 2) * -2) for i, (a, b) in enumerate(itertools.pairwise(chain))]
    flow, side = solved(n, edges)
    assert (flow, len(side)) == (1, n - 1 - n // 2)
