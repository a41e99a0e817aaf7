"""What a notebook shows: HTML that a browser draws, lines by their cell, pictures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform._show import axes, named, short
from xform.jaxpr import trace, walk

ROOT = Path(__file__).parents[1]
CELLS = [
    """
import jax, jax.numpy as jnp, xform
from xform import causal, documents, sliding_window

def step(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

w, x = jnp.eye(256) / 2, jnp.ones((64, 256))
""".strip(),
    "(causal() & (sliding_window(300) | documents(jnp.arange(2048) // 700))).show(2048)",
    "costs = xform.cost(jax.grad(step))(w, x)\ncosts",
    "xform.memory(jax.grad(step))(w, x)",
    'xform.roofline(costs, "H200")',
    "report = xform.explain(jax.grad(step))(w, x)\nreport",
    "causal().show(512).plot()",
    "report.timeline()",
    "report.roofline()",
]
TABLES = ("What a call costs", "Kept for the backward pass", "bound by", "By source line")


@pytest.fixture
def shell(monkeypatch):
    """An IPython that has compiled one cell, the third, from a file `/tmp/cell.py`."""
    name = lambda file: ("Cell", "In[3]") if file == "/tmp/cell.py" else None
    ipython = SimpleNamespace(compile=SimpleNamespace(format_code_name=name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: ipython))


def test_a_line_of_a_notebook_is_that_of_its_cell(shell):
    assert named("/tmp/cell.py") == "In[3]"
    assert named("/tmp/other.py") == "/tmp/other.py"
    scope: dict = {}
    exec(compile("def f(x):\n    return 2 * x", "/tmp/cell.py", "exec"), scope)
    (site,) = walk(trace(scope["f"], 1.0))
    assert site.line == "In[3]:2 (f)"
    assert "In[3]:2 (f)" in str(xform.cost(scope["f"])(1.0))
    assert "In[3]:2 (f)" in str(xform.explain(scope["f"])(jnp.ones(3)))


def test_a_line_of_a_script_stays_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert named("/tmp/cell.py") == "/tmp/cell.py"
    assert short("/tmp/deep/down/cell.py:2 (f)") == "down/cell.py:2 (f)"


def test_reports_print_as_tables_and_escape_what_they_show():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    square = lambda x: x @ x  # a function whose name, `<lambda>`, is no HTML
    costs = xform.cost(square)(x)
    for report in (costs, xform.memory(jax.grad(lambda x: square(x).sum()))(x)):
        assert repr(report) == str(report)
        assert "test_show.py" in repr(report)
        assert "&lt;lambda&gt;" in report._repr_html_()
        assert "<lambda>" not in report._repr_html_()
    bounds = xform.roofline(costs, "H200")
    assert "FLOP/B" in repr(bounds)
    assert "FLOP/B" in bounds._repr_html_()


def test_axes_are_those_given_or_new_ones():
    pytest.importorskip("matplotlib")
    new = axes(None, 3, 2)
    assert axes(new, 9, 9) is new
    assert tuple(new.figure.get_size_inches()) == (3, 2)


@pytest.fixture(scope="module")
def notebook():
    """A notebook of all that shows itself, executed."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    made = nbformat.v4.new_notebook(cells=cells)
    run = nbclient.NotebookClient(made, timeout=300, kernel_name="python3")
    return run.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_reports_show_themselves_in_a_notebook(notebook):
    shown = [cell.outputs[-1].data if cell.outputs else {} for cell in notebook.cells]
    assert all("text/html" in data for data in shown[1:6])
    for data in shown[2:6]:
        assert "In[1]:6 (step)" in data["text/html"]
    for cell in notebook.cells[6:]:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source


@pytest.mark.slow
def test_a_browser_draws_them(notebook, tmp_path):
    """Tables have their text in the page, the mask its colours on the screen."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
    if found is None:
        pytest.skip("there is no browser here: install chromium (`apt-get install chromium`)")
    nbconvert = pytest.importorskip("nbconvert")
    image = pytest.importorskip("matplotlib.image")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(nbconvert.HTMLExporter().from_notebook_node(notebook)[0])
    browser = [found, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    draw = [f"--screenshot={picture}", "--window-size=1100,4200", "--hide-scrollbars"]
    subprocess.run([*browser, *draw, page.as_uri()], check=True, capture_output=True, timeout=120)
    text = subprocess.run(
        [*browser, "--dump-dom", page.as_uri()], check=True, capture_output=True, timeout=120
    ).stdout.decode()
    for title in TABLES:
        assert title in text
    pixels = np.round(image.imread(picture)[..., :3] * 255).astype(int)
    for colour in ((0x2D, 0x6A, 0x8E), (0xF2, 0xA6, 0x5A)):  # of full and of partial tiles
        assert np.all(pixels == colour, axis=-1).sum() > 100
