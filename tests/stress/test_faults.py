"""Some of what benchmarks/fault_campaign.py does at length."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("tyro")

from benchmarks.fault_campaign import FAULTS, HUNG, Campaign, Life, lines_in, live, own_port


def test_three_faults_lose_nothing(tmp_path):
    kinds = ["killed", "stopped", "killed before it commits"]
    campaign = Campaign(tmp_path, steps=14)
    campaign.undisturbed()
    assert [life.fault for life, _ in campaign.faults(kinds)] == kinds


@pytest.mark.slow
def test_twenty_faults_of_every_kind_lose_nothing(tmp_path):
    campaign = Campaign(tmp_path, seed=1)
    campaign.undisturbed()
    kinds = [*FAULTS, *FAULTS]
    assert len(kinds) == 20
    assert [life.fault for life, _ in campaign.faults(kinds)] == kinds


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_of_three_processes_one_is_stopped_and_the_others_name_it_and_end(tmp_path, rank):
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        outcome = live(Life(tmp_path / "run", 3, port, "stopped", step=4, rank=rank))
    del outcome.codes[rank], outcome.said[rank]
    assert outcome.codes == [HUNG, HUNG], outcome.said
    for words in outcome.said:
        assert re.search(r"rank \d hangs: for 4.0 s it was at step \d in phase `step`", words), (
            words
        )
        named = rf"rank {rank} gives no sign of life: it was last seen at step [345] in phase"
        assert re.search(named, words), words
        assert len(re.findall("gives no sign of life", words)) == 1, words


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["added", "scattered"])
def test_a_process_that_comes_40_s_late(tmp_path, fsdp):
    """Gloo waits for it in a sum; where gradients are scattered for 30 s, whatever it is told."""
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        life = Life(tmp_path / "run", 2, port, "slow", 4, 1, steps=8, pause=40.0, fsdp=fsdp)
        outcome = live(life)
    if not fsdp:
        assert outcome.finished, outcome.said
        assert len(lines_in(life.folder)) == 8
        return
    assert outcome.codes == [1, 1], outcome.said
    assert re.search(r"rank 0: .*Gloo ReduceScatter failed", outcome.said[0], re.DOTALL)
    with own_port() as port:
        assert live(replace(life, port=port, fault=None)).finished
    assert len(lines_in(life.folder)) == 8
