"""Some of what benchmarks/fault_campaign.py does at length."""

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("tyro")

from benchmarks.fault_campaign import FAULTS, Campaign


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
