"""Any input is answered, and the fuzzer can find faults.

The cases are the same each time: `make fuzz` searches for others, a test repeats.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
from hypothesis import strategies

from celery_singleton_lock import cleaned
from celery_singleton_lock.stores.redis.script import Call
from tests.fuzz.choices import Choices, Stuck
from tests.fuzz.targets import TARGETS

#: How many times as many cases as in `make test`.
TIMES = int(os.environ.get("FUZZ_TIMES", "1"))

#: Numbers of bytes that a case may have.
SIZES = (0, 2, 8, 24, 64, 160, 400)

#: Seconds of CPU time that one case may take: if it takes more it is stuck, however busy the machine is.
MOST_WORK = 20.0

INPUTS = strategies.sampled_from(SIZES).flatmap(lambda size: strategies.binary(min_size=size, max_size=size))


class Written(logging.Handler):
    """Formats each line, and writes it nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.Formatter().format(record)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Celery warns about such messages, and logs task names that pytest could not pass between processes."""
    warnings.simplefilter("ignore")
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [Written()]
    yield
    root.handlers = handlers


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stuck(f"it has worked for {MOST_WORK:.0f} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_WORK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(target: str, cases: int, **settings: Any) -> None:
    """Run this many cases; Hypothesis reduces the one that fails."""
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    with TARGETS[target][0]() as case:

        @hypothesis.settings(
            max_examples=cases, suppress_health_check=checks, report_multiple_bugs=False, database=None
        )
        @hypothesis.given(data=INPUTS)
        def run(data: bytes) -> None:
            with limited():
                case(Choices(data))

        run()


@pytest.mark.timeout(max(600, 60 * TIMES))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("times", [TIMES, pytest.param(20, marks=pytest.mark.slow)])
def test_any_input_is_answered(target: str, times: int) -> None:
    fuzz(target, times * TARGETS[target][1])


@pytest.mark.parametrize(
    ("target", "broken", "error"),
    [
        ("parsers", lambda: patch.object(cleaned, "array", json.loads), "Expecting value"),
        ("answers", lambda: patch.object(Call, "understood", lambda self, answer: answer), "values|missing"),
    ],
)
def test_what_is_not_checked_is_found(target: str, broken: Any, error: str) -> None:
    with broken(), pytest.raises((TypeError, ValueError), match=error):
        fuzz(target, 2000, phases=[hypothesis.Phase.generate])
