"""A few seconds of what `make fuzz` does for minutes, and a check that it can find faults.

The cases are the same each time: `make fuzz` searches, a test repeats.
"""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from celery_singleton_lock import cleaned
from celery_singleton_lock.stores.redis.script import Call
from tests.fuzz.choices import Choices
from tests.fuzz.running import Found, by_chance, once
from tests.fuzz.targets import TARGETS

#: The number of cases of each target that takes a second or less.
FEW = {"parsers": 1000, "keys": 500, "options": 200, "messages": 60, "answers": 150, "stored": 60, "commands": 40}

SEED = 1


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore")  # Celery warns about such messages.


class Written(logging.Handler):
    """Formats each line, and writes it nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.Formatter().format(record)


@contextmanager
def written_nowhere() -> Iterator[None]:
    """Celery logs task names that may not be valid Unicode, which pytest could not pass between processes."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [Written()]
    try:
        yield
    finally:
        root.handlers = handlers


@pytest.mark.parametrize("target", TARGETS)
def test_any_input_is_answered(target: str) -> None:
    with written_nowhere(), TARGETS[target][0]() as case:
        by_chance(target, case, FEW[target], SEED)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_many_inputs_are_answered(target: str) -> None:
    with written_nowhere(), TARGETS[target][0]() as case:
        by_chance(target, case, 20 * FEW[target], SEED)


def test_same_bytes_make_the_same_case() -> None:
    data = random.Random(5).randbytes(200)
    assert repr(Choices(data).mutated({"a": [1, "x"]})) == repr(Choices(data).mutated({"a": [1, "x"]}))


def test_each_decision_is_the_simplest_where_the_bytes_end() -> None:
    choices = Choices(b"")
    assert (choices.below(1000), choices.content(), choices.mutated([1])) == (0, b"", [1])


def test_failing_case_is_reduced() -> None:
    def case(choices: Choices) -> None:
        assert b"!" not in choices.content(200)

    with pytest.raises(Found) as found:
        once("none", case, bytes([150]) + b"x" * 100 + b"!" + b"y" * 200)
    assert len(found.value.data) < 8


class TestFaultsAreFound:
    def test_json_that_is_not_checked(self) -> None:
        with (
            patch.object(cleaned, "array", json.loads),
            TARGETS["parsers"][0]() as case,
            pytest.raises(Found, match=r"python -m tests\.fuzz parsers --data"),
        ):
            by_chance("parsers", case, 2000, 1)

    def test_answers_that_are_not_checked(self) -> None:
        with (
            patch.object(Call, "understood", lambda self, answer: answer),
            TARGETS["answers"][0]() as case,
            pytest.raises(Found),
        ):
            by_chance("answers", case, 2000, 1)
