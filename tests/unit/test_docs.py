"""The documentation tells the truth as far as a machine can see: links resolve, code runs, options are all listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from celery_singleton_lock.options import _BEAT_SETTINGS, _OPTIONS, _SETTINGS, MAX_TTL, MIN_TTL

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_code_runs_as_it_stands() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3  # The last one needs a server, and is run by tests/integration/test_lock.py.
    names: dict[str, object] = {}
    for block in blocks[:2]:
        exec(compile(block, "README.md", "exec"), names)
    app = names["app"]
    app.conf.broker_url = "memory://"  # type: ignore[attr-defined]
    for task in ("rebuild_report", "sync", "clean_up", "bill", "refund"):
        assert names[task].apply((7,) * 2).state in ("SUCCESS", "FAILURE")  # type: ignore[attr-defined]
    assert names["ship"].apply(({"id": 1},)).get() is None  # type: ignore[attr-defined]
    bill, refund, sync = (names[task].lock_key_of for task in ("bill", "refund", "sync"))  # type: ignore[attr-defined]
    assert bill(7, 1) == refund(7, 30) != bill(8, 1)
    assert sync(1) == sync(1, full=True)


def test_docs_list_every_option_and_default() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    for name, option in _OPTIONS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{option.attribute}` |")]
        assert f"`{option.setting}`" in row
        assert name in ("scope", "limit") or f"`{name}`" in row
        default = option.default
        quoted = f'`"{default}"`' if isinstance(default, str) else f"`{default}`"
        shown = f"{default:g}" if isinstance(default, float) else quoted
        assert f"| {shown} |" in row
    for setting in (*_SETTINGS, *_BEAT_SETTINGS):
        assert f"| `{setting}` |" in page
    assert f"({MIN_TTL:g} to {MAX_TTL:g})" in page


def test_lifecycle_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)+)`", (ROOT / "docs" / "lifecycle.md").read_text())
    assert len(named) > 50
    for path, parts in named:
        tree: ast.AST = ast.parse((ROOT / path).read_text())
        for part in parts.strip(":").split("::"):
            found = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == part]
            assert found, f"{path} has no {part}"
            tree = found[0]
    rows = [line for line in (ROOT / "docs" / "lifecycle.md").read_text().splitlines() if line.startswith("| ")]
    assert all("`tests/" in row or row.startswith("| event") for row in rows)
