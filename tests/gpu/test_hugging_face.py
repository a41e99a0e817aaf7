"""Logits beside `transformers` in this process, of models that either wrote; ours on one GPU."""

import pytest

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")

from tests.examples import test_hugging_face as small

# Warnings of its own, of what it will change, are no failures of ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A folder with models of both, and their logits by `transformers`."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.examples import transformers_judge

    folder = tmp_path_factory.mktemp("judged")
    small.write_problems(folder)
    transformers_judge.main(folder)
    return folder


@pytest.mark.parametrize("name", small.BOTH)
def test_logits_are_those_of_transformers(judged, name):
    small.check_logits(judged, name)
