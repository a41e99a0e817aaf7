import os
import re
import signal
import socket
from multiprocessing import get_context

import jax
import numpy as np
import pytest

from xform.train import processes
from xform.train.run import Stop

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["xform.train.processes"])


def test_one_process_waits_for_nobody(tmp_path):
    processes.join(None, 1, 0)
    processes.wait("here", seconds=0.0)
    processes.meet(1)
    stop = Stop()
    assert not processes.asked_to(stop)
    assert processes.all_agree(True)
    assert not processes.all_agree(False)
    assert processes.own(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="mine"), processes.each_for_itself(__file__):
        raise ValueError("mine")


def test_a_signal_that_comes_while_all_are_asked_is_heard_the_next_time(monkeypatch):
    stop = Stop()

    def gather(asked):
        stop.signal = signal.SIGTERM  # once it has said what it knows
        return np.array([asked, 0])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "process_allgather", gather)
    assert not processes.asked_to(stop)
    assert stop.signal == signal.SIGTERM
    assert processes.asked_to(stop)


def test_all_are_to_be_there():
    with pytest.raises(ValueError, match=r"3 processes were asked for, and 1 are there: give"):
        processes.meet(3)


def test_a_sum_that_is_wrong_is_found(monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: jax.lax.pmax(x, axis))
    with pytest.raises(RuntimeError, match="a sum over all 8 devices is 1 and should be 8"):
        processes.meet(1)


def work(port, rank, sending):
    """Meets, waits once for all and once in vain, and fails."""
    jax.config.update("jax_platforms", "cpu")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    processes.join(f"localhost:{port}", 2, rank)
    processes.meet(2)
    processes.wait("both", seconds=60.0)
    sending.send(("agree", processes.all_agree(rank == 0), processes.all_agree(True)))
    if rank == 0:
        try:
            processes.wait("alone", seconds=0.5)
        except TimeoutError as error:
            sending.send(str(error))
        with processes.each_for_itself(__file__):
            raise OSError("said and gone")
    sending.close()
    sending_nothing, _ = CONTEXT.Pipe()
    sending_nothing.poll(600)


def test_two_processes_meet_agree_and_do_not_wait_for_ever():
    """The second does not come to a barrier, and the first does not wait for it to end."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    (first, sends), (second, also) = CONTEXT.Pipe(), CONTEXT.Pipe()
    workers = [
        CONTEXT.Process(target=work, args=(port, rank, at)) for rank, at in enumerate((sends, also))
    ]
    for worker in workers:
        worker.start()
    try:
        for pipe in (first, second):
            assert pipe.poll(60)
            assert pipe.recv() == ("agree", False, True)
        assert first.poll(60)
        assert re.match(
            r"at the barrier `alone`, rank 1 did not come within 0.5 s to rank 0: ", first.recv()
        )
        workers[0].join(30)
        assert workers[0].exitcode == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
