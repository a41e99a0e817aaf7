"""Some of what benchmarks/fault_campaign.py does at length."""

import re

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
        life = Life(tmp_path / "run", 3, port, "stopped", step=4, rank=rank, hang=20.0)
        outcome = live(life)
    del outcome.codes[rank], outcome.said[rank]
    assert outcome.codes == [HUNG, HUNG], outcome.said
    for words in outcome.said:
        assert re.search(r"rank \d hangs: for 20.0 s it was at step [45] in phase", words), words
        named = rf"rank {rank} gives no sign of life: it was last seen at step [345] in phase"
        assert re.search(named, words), words
        assert words.count("gives no sign of life") == 1, words


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["whole", "split"])
def test_a_process_that_comes_40_s_late_is_waited_for(tmp_path, fsdp):
    """Gloo waits 30 s where gradients are scattered, but parameters are gathered before that."""
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        life = Life(tmp_path / "run", 2, port, "slow", 4, 1, steps=8, pause=40.0, fsdp=fsdp)
        outcome = live(life)
    assert outcome.finished, outcome.said
    lines = lines_in(life.folder)
    assert len(lines) == 8
    assert sum(lines[3]["seconds"].values()) > 38, "of step 4"
