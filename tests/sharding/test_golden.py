"""What devices say to each other in the rules' own programs, held to the numbers in a file."""

import json
from functools import partial

import jax
import pytest

from tests.sharding.golden import FILE, PROGRAMS
from xform.sharding import Audit

GOLDEN = json.loads(FILE.read_text())


def every_permute_has_a_product_beside_it(report: Audit, n: int):
    """Five rounds of n - 1 chunks, two forward and three backward; some messages are joined."""
    assert {m.op for m in report.messages} == {"collective-permute"}
    assert all(m.covered for m in report.messages)
    chunk = 4096 // n * 4096 * 2
    # The rounds of x, forward and backward, begin by the same message, which is sent once.
    assert sum(m.sent * m.trips for m in report.messages) == (5 * (n - 1) - 1) * chunk


def gathers_are_hidden_in_every_loop(report: Audit):
    looped = [m for m in report.messages if m.op == "all-gather" and m.looped]
    assert len(looped) == 8  # of two arrays, in two layers of a pass, forward and backward
    assert all(m.covered for m in looped)
    # What arrived is not copied to where the next pass wants it, but for one array of four.
    copies = [k for k in report.program.kernels if k.kind == "copy" and k.loops]
    array, passes = 2048 * 8192 * 2, 3 + 3
    assert sum(k.bytes * k.trips for k in copies) <= 1.01 * passes * 2 * array


def some_gathers_are_exposed(report: Audit):
    assert not all(m.covered for m in report.messages if m.op == "all-gather" and m.looped)


def gradients_are_summed_once_outside_of_all_loops(report: Audit):
    messages = report.messages
    assert all(m.op == "all-reduce" and not m.looped and m.trips == 1 for m in messages)
    (gradients,) = [m for m in messages if "data.per_device" in m.rules]
    # Of four layers of 1,024², a scale, and the loss that XLA joined to them.
    assert gradients.arrays == (f"f32[{4 * 1024**2 + 1024 + 1}]",)


def logits_are_never_gathered(report: Audit):
    tokens, codes = 2048, 128_256
    assert all(m.sent <= 2 * tokens * 1024 * 2 for m in report.messages)
    made = [
        leaf.size
        for computation in report.program.module.computations.values()
        for instruction in computation.instructions.values()
        for leaf in instruction.leaves
    ]
    assert max(made) < tokens * codes // 8


CHECKS = {
    "feed forward, tp=2": partial(every_permute_has_a_product_beside_it, n=2),
    "feed forward, tp=4": partial(every_permute_has_a_product_beside_it, n=4),
    "feed forward, tp=8": partial(every_permute_has_a_product_beside_it, n=8),
    "layers, 1 ahead": gathers_are_hidden_in_every_loop,
    "layers, 0 ahead": some_gathers_are_exposed,
    "microbatches, 1": gradients_are_summed_once_outside_of_all_loops,
    "microbatches, 4": gradients_are_summed_once_outside_of_all_loops,
    "vocabulary, tp=8": logits_are_never_gathered,
}


SLOW = ("feed forward, tp=8", "layers, 0 ahead")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PROGRAMS]
)
def test_communication_is_that_of_the_file(name):
    """Promises of rules are kept, or the audit raises; and numbers stay what they were."""
    report = PROGRAMS[name]()
    CHECKS[name](report)
    # The compiler's passes differ from version to version.
    if jax.__version__ == GOLDEN["jax"]:
        assert report.counts() == GOLDEN[name]


def test_the_file_has_every_program():
    assert GOLDEN.keys() - {"jax"} == PROGRAMS.keys() == CHECKS.keys()
