"""Some of what benchmarks/fault_campaign.py does at length."""

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("tyro")

from benchmarks.fault_campaign import FAULTS, Campaign


def test_three_faults_lose_nothing(tmp_path):
    campaign = Campaign(tmp_path, ("killed", "stopped", "killed before it commits"), steps=14)
    campaign.undisturbed()
    assert [life.fault for life, _ in campaign.faults(3)] == list(campaign.kinds)


@pytest.mark.slow
def test_twenty_faults_of_every_kind_lose_nothing(tmp_path):
    campaign = Campaign(tmp_path, seed=1)
    campaign.undisturbed()
    came = [life.fault for life, _ in campaign.faults(20)]
    assert len(came) == 20
    assert set(came) == set(FAULTS)
