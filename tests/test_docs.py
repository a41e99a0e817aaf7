"""The site and README: every name has its place, every block of code runs, every claim its test."""

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

import xform

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(DOCS.rglob("*.md"))
API = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]
# A fence of Python, with the name of whose code it is if there are several on a page.
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
OTHERS = {"FlexAttention", "JAX", "MaxText", "torchtitan"}
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def here(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- names ---------------------------------------------------------------------------------------


def exported(package: str) -> Iterator[str]:
    """Every public name of a package, by its path, and of the modules that it exports."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    whole = ast.parse(Path(module.__file__).read_text())
    listed = {alias.asname for node in ast.walk(whole) if isinstance(node, ast.ImportFrom)
              for alias in node.names if alias.asname}  # fmt: skip
    for name in sorted(listed):
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield f"{package}.{name}"
        elif value.__name__.startswith("xform") and hasattr(value, "__path__"):
            yield from exported(value.__name__)
        else:
            yield from defined(value.__name__)


def defined(module: str) -> Iterator[str]:
    """Every public function and class of a module, and every constant that has words."""
    whole = importlib.import_module(module)
    assert whole.__file__ is not None
    body = ast.parse(Path(whole.__file__).read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                pass
            case ast.TypeAlias(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    continue
            case _:
                continue
        if not name.startswith("_"):
            yield f"{module}.{name}"


TRAIN = sorted(path.stem for path in (ROOT / "xform" / "train").glob("[a-z]*.py"))


def value(path: str):
    """What a path stands for; modules that are loaded when asked for are."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return attrgetter(path.removeprefix("xform."))(xform)


@pytest.fixture(scope="module")
def public() -> list[str]:
    for package in ("grain", "matplotlib", "optax", "orbax", "tokenizers"):
        pytest.importorskip(package)
    parts = [defined(f"xform.train.{name}") for name in TRAIN]
    return [
        *exported("xform"),
        *exported("xform.train"),
        *(name for part in parts for name in part),
    ]


def test_every_public_name_is_on_one_page(public):
    places = [id(value(path)) for path in API]
    assert len(set(places)) == len(places), "a name is on two pages"
    assert not sorted(path for path in public if id(value(path)) not in set(places))


def test_every_public_name_has_words(public):
    assert not [p for p in public if callable(value(p)) and not (value(p).__doc__ or "").strip()]


def test_every_public_function_has_an_example(public):
    functions = {p: value(p) for p in public if inspect.isfunction(inspect.unwrap(value(p)))}
    assert len(functions) > 100
    assert not sorted(p for p, f in functions.items() if ">>> " not in (inspect.getdoc(f) or ""))


# ---- code ----------------------------------------------------------------------------------------


def run(code: str, source: str, scope: dict) -> None:
    if "audit(" in code and "target=None" not in code:
        pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
    exec(compile(code, source, "exec"), scope)


# These compile for many seconds; what they show is what other tests are about.
SLOW_BLOCKS = (2, 9)
SLOW_PAGES = ("flex-attention", "jax", "maxtext")


def marked(items, slow):
    """Parameters by their ids; those of some ids are slow."""
    marks = lambda name: [pytest.mark.slow] if name in slow else []
    return [pytest.param(item, id=str(name), marks=marks(name)) for name, item in items]


@pytest.mark.parametrize("block", marked(enumerate(BLOCKS, 1), SLOW_BLOCKS))
def test_a_block_of_the_readme_runs(block):
    run(block, "README.md", {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page", marked([(p.stem, p) for p in PAGES if "```" in p.read_text()], SLOW_PAGES)
)
def test_blocks_of_a_page_run(page):
    """From top to bottom, in one scope, but for what others' programs are shown beside."""
    scope, ran = {"__name__": "__main__"}, 0
    for language, title, code in FENCE.findall(page.read_text()):
        assert title in {"", "xform", *OTHERS}, f"whose code is {title!r}?"
        if language == "python" and title not in OTHERS:
            run(code, here(page), scope)
            ran += 1
    assert ran


# What the flags of an example's command line make.
CONFIGS = {"train": "Config", "generate": "Config", "hugging_face": "Asked", "train_ray": "Asked"}
COMMANDS = [
    line.partition("examples/")[2].rstrip(" &")
    for path in (ROOT / "README.md", *PAGES)
    for language, title, code in FENCE.findall(path.read_text())
    if language == "sh" and title not in OTHERS
    for line in code.replace("\\\n", " ").splitlines()
    if "examples/" in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_flags_that_there_are(command):
    tyro = pytest.importorskip("tyro")
    script, *flags = shlex.split(command)
    if script == "train_ray.py":
        pytest.importorskip("ray")
    name = script.removesuffix(".py")
    config = getattr(importlib.import_module(name), CONFIGS[name])
    assert isinstance(tyro.cli(config, args=flags), config)


# ---- claims --------------------------------------------------------------------------------------

CLAIMS = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", (DOCS / "guarantees.md").read_text())


def test_there_are_claims():
    assert len(CLAIMS) > 60


@pytest.mark.parametrize("claim", sorted({claim.partition("::")[0] for claim in CLAIMS}))
def test_what_a_guarantee_names_exists(claim):
    names = {
        test for path, _, test in (c.partition("::") for c in CLAIMS) if path == claim and test
    }
    assert names <= set(re.findall(r"^def (test_\w+)", (ROOT / claim).read_text(), re.MULTILINE))


# ---- the site ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("material", "mkdocs", "mkdocstrings"):
        pytest.importorskip(package)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "WARNING" not in done.stderr
    for path in API:
        page = next(p for p in (DOCS / "api").glob("*.md") if f"::: {path}\n" in p.read_text())
        assert f'id="{path}"' in (tmp_path / "api" / page.stem / "index.html").read_text()
