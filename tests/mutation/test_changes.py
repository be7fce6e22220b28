"""A changed file is still a program, and a different one."""

from __future__ import annotations

import ast
import random

import pytest
from lupa import lua51

from tests.mutation import lua, python
from tests.mutation.change import Change
from tests.mutation.files import changes

EVERY = changes()


def test_each_file_can_be_changed() -> None:
    assert len(EVERY) > 1500
    assert len({change.file for change in EVERY}) > 35


@pytest.mark.parametrize("change", random.Random(1).sample(EVERY, 60), ids=lambda change: change.name)
def test_change_makes_a_different_program(change: Change) -> None:
    assert change.changed != change.text
    if change.file.endswith(".lua"):
        lua51.LuaRuntime().compile(change.changed)
    else:
        assert ast.dump(ast.parse(change.changed)) != ast.dump(ast.parse(change.text))


def test_rules_for_lua() -> None:
    text = "-- 1 == 2\nif a <= 3 and KEYS[1] then\n  wake('1 < 2')\nend\n"
    found = [(text[edit.start : edit.end], edit.new) for edit in lua.edits(text)]
    assert found == [("<=", "<"), ("3", "4"), ("and", "or"), ("wake('1 < 2')", "")]


def test_rules_for_python() -> None:
    text = '"""1 < 2"""\nlogger.info("a", 1 + 2)\nif not a < 3:\n    begin(b, "ä", 1)\n'
    changed = {edit.rule: text[: edit.start] + edit.new + text[edit.end :] for edit in python.edits(text)}
    begun = text.splitlines()[:2]
    assert changed["operator"].splitlines() == [*begun, "if not a <= 3:", '    begin(b, "ä", 1)']
    assert changed["left out"].splitlines() == [*begun, "if not a < 3:", "    pass"]
    assert changed["arguments swapped"].splitlines()[-1] == '    begin("ä", b, 1)'
    assert changed["number"].splitlines()[-1] == '    begin(b, "ä", (1 + 1))'
    assert [edit.rule for edit in python.edits('begin("", "")')] == ["left out"], "equal arguments are not swapped"
    assert changed["not left out"].splitlines()[2] == "if (a < 3):"
    assert changed["the other way"].splitlines()[2] == "if not (not a < 3):"
