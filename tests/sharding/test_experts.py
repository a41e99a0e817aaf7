"""Experts over a mesh: parity, no token lost or doubled, losses, communication, errors."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.oracle import assert_as_right_as, in_float64
from tests.sharding import experts_cases as cases
from tests.sharding.equal import mesh_of, on_one, run_on, values
from tests.sharding.experts_cases import Case, E, M, T
from xform import cost, precision
from xform.sharding import TensorParallel, audit, meshes, shardings
from xform.sharding.experts import (
    ExpertParallel,
    Load,
    Routes,
    Routing,
    balance_loss,
    load_of,
    route,
    total,
)
from xform.sharding.experts._places import by_expert, digits, places, undigits

AXES = ("dp", "cp", "tp", "ep")
DROPLESS = Routing(E, 2)
SIGMOID = Routing(E, 3, "sigmoid", scale=2.5)
CAPACITY = Routing(E, 2, capacity=1.0, normalise=False)
GROUPED = Routing(E, 2, "sigmoid", normalise=False, capacity=1.5, group=2)


# ---- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, tp=2, ep=2, routing=DROPLESS, shared=True),
        Case(cp=2, tp=2, ep=2, routing=SIGMOID, sequence=True, shared=True),
        Case(dp=2, cp=2, ep=2, routing=CAPACITY),
        Case(tp=2, ep=4, routing=GROUPED, sequence=True),
        Case(ep=8, routing=DROPLESS),
        Case(tp=2, ep=4, routing=DROPLESS, sequence=True, shared=True, both=True),
    ],
    ids=str,
)
def test_loss_and_every_gradient_equal_those_of_one_device(case, unchecked):
    with jax.enable_checks(False):
        report = cases.compared(case)
    assert {leaf.path for leaf in report.leaves} >= {"loss", "router", "gate", "down", "scale"}


ALL = [
    Case(**sizes, routing=routing, sequence=sequence, shared=shared)
    for sizes in meshes(8, AXES)
    for routing, shared in ((DROPLESS, True), (SIGMOID, False), (CAPACITY, False), (GROUPED, True))
    for sequence in (False, True)
    if not sequence or sizes["tp"] * sizes["cp"] <= T
    if routing.group is None or T // sizes["cp"] % routing.group == 0
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_on_every_mesh_of_eight(case, unchecked):
    with jax.enable_checks(False):
        cases.compared(case)
