"""A notebook says what its text says, and running it anew says what it says."""

import math
import re

import pytest

for name in ("ipykernel", "matplotlib", "nbclient", "optax"):
    pytest.importorskip(name)
jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
notebooks = pytest.importorskip("execute")
SOURCES = notebooks.SOURCES

# These run in every suite; the others are slow.
QUICK = ("01_from_python_to_jaxprs", "05_recompute_or_reuse")
SLOW = pytest.mark.slow
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
every = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def kept(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_are_as_many_texts_as_notebooks():
    assert [s.stem for s in SOURCES] == sorted(path.stem for path in notebooks.HERE.glob("*.ipynb"))
    assert {s.stem for s in SOURCES} >= {*QUICK}


@every
def test_text_and_notebook_say_the_same(source):
    cells = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells(jupytext.read(source)) == cells(kept(source))


@every
def test_notebook_was_run_from_top_to_bottom(source):
    notebook = kept(source)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=s.stem, marks=[] if s.stem in QUICK else [SLOW]) for s in SOURCES],
)
def test_running_it_says_what_it_says(source):
    """Word for word, and number for number but for the last digits, which processors differ in.

    Of a cell tagged `measured`, which tells times or roundings, only the kind of what it shows.
    """
    for old, new in zip(kept(source).cells, notebooks.execute(source).cells, strict=True):
        measured = "measured" in old.metadata.get("tags", ())
        before, after = (list(map(said, cell.get("outputs", ()))) for cell in (old, new))
        kinds = lambda outputs: [kind for kind, _ in outputs]
        assert kinds(after) == kinds(before), new.source
        assert not {"error", "stderr"} & {kind for kind, _ in after}, new.outputs
        if not measured:
            same(before, after)


def said(output):
    """What an output shows: its kind, and its text."""
    if output.output_type == "stream":
        return output.name, output.text
    data = output.get("data", {})
    text = "" if "image/png" in data else data.get("text/plain", "")
    return " ".join(sorted(data)) or output.output_type, text


def same(before, after):
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert NUMBER.sub("#", new) == NUMBER.sub("#", old)
        for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
            assert math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=1e-5), (old, new)


@pytest.mark.parametrize("wrong", ["loss 0.52 after 30", "loss 0.5 after 31", "Loss 0.5 after 30"])
def test_another_output_is_noticed(wrong):
    same([("stdout", "loss 0.5 after 30")], [("stdout", "loss 0.501 after 30")])
    with pytest.raises(AssertionError):
        same([("stdout", "loss 0.5 after 30")], [("stdout", wrong)])
