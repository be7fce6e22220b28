"""The documentation is true as far as a machine can check: links resolve, code runs, all options are listed."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from pathlib import Path

import click
import pytest
from celery import Celery
from celery.bin.celery import celery

import celery_singleton_lock
from celery_singleton_lock.options.rules import BEAT_SETTINGS, CALL_KEYS, LOCK_SETTINGS, MAX_TTL, MIN_TTL, OPTIONS
from docs import generate
from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(celery_singleton_lock.__file__).parent  # `make wheel` has it elsewhere.
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    ROOT / "tests" / "lifecycle.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]

#: The address of the documentation, as in pyproject.toml.
SITE = "https://celery-singleton-lock.readthedocs.io/en/latest/"

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@page_by_page
def test_docs_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", text):
        there = published(target) or (page.parent / target if target else page)
        if not target.startswith("https://") or published(target) is not None:
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def published(url: str) -> Path | None:
    """The file behind a link to this project's site or repository, as in README; None for other links."""
    if url.startswith(SITE):
        return ROOT / "docs" / re.sub(r"\.html$", ".md", url.removeprefix(SITE))
    files = re.match(
        r"https://(?:github\.com|raw\.githubusercontent\.com)/[\w-]+/celery-singleton-lock/(?:blob/)?main/(.+)", url
    )
    return ROOT / files[1] if files else None


def test_readme_can_be_read_on_the_package_index() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page_by_page
def test_docs_commands_exist(page: Path) -> None:
    for command in commands(page.read_text()):
        program, *words = command.split()
        if program == "celery":
            assert unknown_words(words) == [], command
        elif program == "make":
            assert set(words[:1]) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), (
                command
            )
        elif words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1]), command


def commands(text: str) -> list[str]:
    """The commands of a page, in fenced or indented blocks and inline."""
    lines = re.findall(r"^(?:\$ | {4})((?:celery|make|python) .+?)(?:  +#.*)?$", text, re.MULTILINE)
    inline = re.findall(r"`((?:celery|make|python) [^`]+)`", text.replace("\n", " "))
    return [command for command in lines + inline if not command.endswith("…")]


def unknown_words(words: list[str]) -> list[str]:
    """The options and subcommands that `celery` does not have."""
    unknown: list[str] = []
    command: click.Command = celery
    known = {"-A", "--help"}
    for word in itertools.takewhile(lambda word: word not in ("--", "|"), words):
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
            known |= {name for parameter in command.params for name in parameter.opts}
            known |= {name for option in Celery().user_options.get(word, ()) for name in option.opts}
        elif word.startswith("-") and word.partition("=")[0] not in known:
            unknown.append(word)
    return unknown if command is not celery else [*unknown, "no command"]


def test_nonexistent_commands_are_found() -> None:
    assert unknown_words(["-A", "shop", "worker", "-P", "threads", "--singleton-lock-ttl=5"]) == []
    assert unknown_words(["-A", "shop", "worker", "--lock-ttl", "5"]) == ["--lock-ttl"]
    assert unknown_words(["-A", "shop", "lokcs"]) == ["no command"]


def test_options_are_those_of_the_code() -> None:
    page = generate.PAGE.read_text()
    assert generate.with_facts(page) == page, "run: python -m docs.generate"


def test_page_of_options_has_exactly_the_existing_options() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    with pytest.raises(ValueError, match="one heading, a text and a list for lock_wait: there are 0"):
        generate.with_facts(page.replace("### lock_wait", "### Waiting"))
    with pytest.raises(ValueError, match="options that do not exist: lock_hurry"):
        generate.with_facts(f"{page}\n### lock_hurry\n\nHurry.\n")


def test_docs_list_every_option_and_default() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    for name, option in OPTIONS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [`{option.attribute}`](#")]
        assert f"- setting: `{option.setting}`" in page
        assert name not in CALL_KEYS or f"`{name}`" in row
        default = option.default
        quoted = f'"{default}"' if isinstance(default, str) else f"{default}"
        shown = f"{default:g}" if isinstance(default, float) else quoted
        assert f"| `{shown}` |" in row
    for setting in (*LOCK_SETTINGS, *BEAT_SETTINGS):
        assert f"| [`{setting}`](#{setting}) |" in page
    assert f"- allowed: a number of seconds from {MIN_TTL:g} to {MAX_TTL:g}" in page


def test_lifecycle_names_tests_and_mutants_that_exist() -> None:
    text = (ROOT / "tests" / "lifecycle.md").read_text()
    named = re.findall(r"`((?:tests|celery_singleton_lock/testing)/[\w/]+\.py)((?:::\w+)+)`", text)
    assert len(named) > 50
    for path, parts in named:
        tree: ast.AST = ast.parse((ROOT / path).read_text())
        for part in parts.strip(":").split("::"):
            found = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == part]
            assert found, f"{path} has no {part}"
            tree = found[0]
    assert {*re.findall(r'mutant "([^"]+)"', text)} <= {mutant.name for mutant in MUTANTS}
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all("`tests/" in row or 'mutant "' in row or row.startswith("| event") for row in rows)


def test_design_names_modules_that_exist() -> None:
    named = re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 5
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_each_section_of_the_protocol_is_named_where_it_is_implemented() -> None:
    sections = re.findall(r"^## (\d+)\.", (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE)
    named: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for first, joined, last in re.findall(r"protocol\.md`, sections? (\d+)(?: (to|and) (\d+))?", path.read_text()):
            named |= {str(it) for it in range(int(first), int(last) + 1)} if joined == "to" else {first, last or first}
    assert named == set(sections)
