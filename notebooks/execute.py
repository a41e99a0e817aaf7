"""Run notebooks: their Python text, in percent format, becomes a notebook with its outputs.

    python notebooks/execute.py                     # all of them
    python notebooks/execute.py notebooks/03*.py    # one

The text is what people edit; `tests/test_notebooks.py` holds the notebook beside it to it.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SOURCES = sorted(HERE.glob("[0-9]*.py"))


def execute(source: Path) -> nbformat.NotebookNode:
    """Returns the notebook of a Python text, run from top to bottom by a process of its own.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same in every run
    resources = {"metadata": {"path": str(source.parent)}}
    run = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
        resources=resources,
    )
    run.execute(env=env)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:] or SOURCES):
        nbformat.write(execute(source), source.with_suffix(".ipynb"))
        print(f"{source.stem}: done")
