"""What every test and every doctest runs under: eight devices, checked shapes, no guesses.

It sits at the root, and not in tests/, since the doctests of xform/ run under it too.
"""

from importlib.util import find_spec
from pathlib import Path

import jax
import jaxtyping
import pytest

# Before the package is imported: its annotated shapes and dtypes are then checked at every call.
if find_spec("beartype"):
    jaxtyping.install_import_hook("xform", "beartype.beartype")

from xform.sharding.mesh import cpu_devices

cpu_devices(8)
if not Path("/dev/nvidiactl").exists():
    # The CUDA plugin is here to compile, and says so at length where it finds no GPU.
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples every time, and no deadline: the first example compiles.
    settings.register_profile("xform", derandomize=True, deadline=None, max_examples=25)
    settings.load_profile("xform")


# Files whose doctests need a package that a machine without a registry may lack.
_NEEDS = {
    "xform/train/checkpoint.py": "orbax",
    "xform/train/data.py": "grain",
    "xform/train/order.py": "grain",
    "xform/train/records.py": "pyarrow",
    "xform/train/metrics.py": "matplotlib",
    "tests/examples/transformers_judge.py": "torch",
    "tests/primitives/torch_judge.py": "torch",
}
collect_ignore = [path for path, package in _NEEDS.items() if not find_spec(package)]


def pytest_report_header():
    """Names what is left out."""
    return [f"skipped: doctests of {path}, for want of {_NEEDS[path]}" for path in collect_ignore]


@pytest.fixture
def unchecked():
    """Shape checks off: for a test of the error that users get, who run without them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
