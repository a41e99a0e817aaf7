"""Meshes and programs that two processes of one GPU each make in orders of their own."""

import os

import jax
import pytest

from tests.train import orders
from tests.train.test_orders import check


def test_communicators_may_be_asked_for_in_any_order():
    """Within a limit of time: communicators that are made in two orders would wait for ever."""
    if (count := jax.device_count("gpu")) < 2:
        pytest.skip(f"two GPUs are needed, one for each process, and there are {count}")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    check(orders.start(2, "cuda", given.split(",")[:2] if given else ["0", "1"]))
