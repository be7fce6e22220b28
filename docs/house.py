"""Writes docs/house.md, the folders of the package and what is in them: `python -m docs.house`.

Made from the docstrings and the layers in pyproject.toml; `tests/unit/test_docs.py` fails if the page is out of date.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import celery_singleton_lock

HERE = Path(__file__).parent
PACKAGE = Path(celery_singleton_lock.__file__).parent  # `make wheel` has it elsewhere.

BEGINNING = """<!-- Made from the code by `python -m docs.house`; do not edit. -->
# The house

This page shows where to find a line of code, and where a new one belongs. The [protocol](protocol.md) describes how the
parts work together, `CONTRIBUTING.md` how to work on them.

## Layers

A module imports only from the lines below its own, and from its own folder. `make lint` checks that.
"""


def page() -> str:
    """The whole page."""
    ladder = "\n".join(line.replace(" | ", "   ") for line in layers())
    return f"{BEGINNING}\n```text\n{ladder}\n```\n\n" + "\n".join(_rooms())


def layers() -> list[str]:
    """The layers, the highest first: the first contract of import-linter."""
    text = (HERE.parent / "pyproject.toml").read_text()
    return list(ast.literal_eval(re.findall(r"^layers = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)[0]))


def _rooms() -> Iterator[str]:
    yield from _room(PACKAGE, "The core")
    for folder in sorted(path.parent for path in PACKAGE.rglob("*/__init__.py")):
        name = folder.relative_to(PACKAGE).as_posix()
        yield from _room(folder, f"{name}/")


def _room(folder: Path, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield f"{_docstring(folder / '__init__.py')}\n"
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if modules:
        yield "| module | what it is about |\n|---|---|"
        yield from (f"| `{path.name}` | {_sentence(path)} |" for path in modules)
        yield ""
    if scripts := sorted((folder / "scripts").rglob("*.lua")):
        yield f"Scripts: {', '.join(f'`{path.name}`' for path in scripts)}.\n"


def _docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    first = " ".join(_docstring(path).partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", first, maxsplit=1)[0].replace("|", "\\|")


if __name__ == "__main__":
    (HERE / "house.md").write_text(page())
