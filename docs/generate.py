"""What the site takes from the repository: README, DESIGN, results, notebooks, examples.

MkDocs calls the functions below (`hooks` in mkdocs.yml). Nothing that is made here is kept: pages
exist in memory while the site is built, so that no text stands in two places.
"""

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PICTURES = sorted(ROOT.glob("benchmarks/*.png"))

# Files of the repository, and the pages that they become.
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks/index.md",
    "notebooks/README.md": "notebooks/index.md",
    "notebooks": "notebooks/index.md",
}
FILES = [*NOTEBOOKS, *EXAMPLES]
PAGES |= {str(p.relative_to(ROOT)): str(p.relative_to(ROOT).with_suffix(".md")) for p in FILES}
PAGES |= {str(p.relative_to(ROOT)): str(p.relative_to(ROOT)) for p in PICTURES}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def on_config(config: MkDocsConfig) -> None:
    """Fills the sections of the menu that list files."""
    listed = {"Notebooks": NOTEBOOKS, "Examples": EXAMPLES}
    for section in config.nav or []:
        for title, files in listed.items():
            if title in section:
                pages = [PAGES[str(path.relative_to(ROOT))] for path in files]
                section[title] = [*(section[title] or []), *pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of files."""
    for uri, content in made():
        files.append(File.generated(config, uri, content=content))
    return files


def made() -> Iterator[tuple[str, str | bytes]]:
    """Yields each page and picture, by its place on the site."""
    for source, uri in PAGES.items():
        path = ROOT / source
        if path.suffix == ".md":
            yield uri, linked(path.read_text(), source)
        elif path.suffix == ".png":
            yield uri, path.read_bytes()
    for path in EXAMPLES:
        yield f"examples/{path.stem}.md", f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    for path in NOTEBOOKS:
        yield from notebook(path)


def linked(text: str, source: str) -> str:
    """Returns a page whose links lead to pages; what has none on the site is plain text."""

    def link(match: re.Match) -> str:
        picture, words, target = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path not in PAGES:
            return words
        here = os.path.dirname(PAGES[source])
        return f"{picture}[{words}]({os.path.relpath(PAGES[path], here or '.')})"

    return LINK.sub(link, text)


def notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yields the page of a notebook, with its outputs as they were kept, and its pictures."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for i, output in enumerate(cell["outputs"]):
            name = f"{path.stem}/{number}-{i}.png"
            data = output.get("data", {})
            if "image/png" in data:
                yield f"notebooks/{name}", base64.b64decode(data["image/png"])
            parts.append(shown(output, data, name))
    yield f"notebooks/{path.stem}.md", "\n\n".join(parts) + "\n"


def shown(output: dict, data: dict, name: str) -> str:
    """Returns an output as Markdown: a picture, a table, or text."""
    if "image/png" in data:
        return f'![Figure]({name}){{ .output loading="lazy" }}'
    if "text/html" in data:
        page = "".join(data["text/html"])
        return f'<div class="output">{re.sub(r"\n\s*", " ", page)}</div>'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f'<div class="output" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>'
