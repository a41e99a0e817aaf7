"""Processes make meshes and programs in orders of their own, and start programs in one."""

from tests.train import orders


def check(said: list[dict]) -> None:
    """All programs are right in all processes, and none may start them in its own order."""
    for words in said:
        assert all(words["right"].values()), words
        assert len(words["right"]) == 4
        assert words["refused"].startswith("processes differ in their programs: order is [")
        assert "on rank 0 and [" in words["refused"]
        assert "] on rank 1. Their programs would wait" in words["refused"]


def test_meshes_and_programs_may_be_made_in_any_order_and_are_started_in_one():
    """Two processes of four devices each."""
    check(orders.start(2, "cpu"))
