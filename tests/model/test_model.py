"""The protocol's models hold, and each variant that leaves something out does not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.model.checks import BROKEN, SOUND
from tests.model.spin import HERE, Check, is_here, run

ROOT = Path(__file__).parents[2]
PAGE = (HERE / "README.md").read_text()

with_spin = pytest.mark.skipif(not is_here(), reason="Spin is not installed: apt-get install spin gcc")
#: All in one process, since some take two gigabytes.
one_by_one = pytest.mark.xdist_group("spin")
by_name = {"ids": lambda check: check.name}


def short(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if not check.long]


@with_spin
@one_by_one
@pytest.mark.slow
@pytest.mark.parametrize("check", short(SOUND), **by_name)
def test_model_holds(check: Check) -> None:
    found = run(check)
    assert found.errors == 0, "\n".join(found.trace)


@with_spin
@one_by_one
@pytest.mark.slow
@pytest.mark.parametrize("check", short(BROKEN), **by_name)
def test_variant_that_leaves_something_out_fails(check: Check) -> None:
    found = run(check)
    assert found.errors == 1
    assert found.trace, "the path to the error can be shown"


def test_every_switch_is_in_its_model() -> None:
    for check in (*SOUND, *BROKEN):
        text = (HERE / f"{check.model}.pml").read_text()
        for switch in check.switches:
            assert re.search(rf"#(el)?if.*\b{switch.partition('=')[0]}\b", text), check.name


def test_functions_that_the_page_names_exist() -> None:
    named = re.findall(r"`(celery_singleton_lock/[\w/]+\.(?:py|lua))`((?: `[\w.]+`)*)", PAGE)
    assert len(named) > 15
    for path, names in named:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"^\s*(?:def|class|local function) {name.rpartition('.')[2]}\b", text, re.MULTILINE), (
                f"{path} has no {name}"
            )
