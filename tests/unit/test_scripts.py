"""Values that are both in a script and in Python are the same."""

from __future__ import annotations

import re
from enum import IntEnum
from importlib.resources import files

import pytest

from celery_singleton_lock.stores.redis.ledger import Claim
from celery_singleton_lock.stores.redis.lock_answers import Answer, Freed


@pytest.mark.parametrize(
    ("script", "answers"), [("lock/answers", Answer), ("lock/end", Freed), ("ledger/claim", Claim)], ids=str
)
def test_answers_have_the_same_numbers(script: str, answers: type[IntEnum]) -> None:
    text = files("celery_singleton_lock.stores.redis").joinpath(f"scripts/{script}.lua").read_text()
    (line,) = re.findall(r"^local ([A-Z_, ]+) = ([0-9, ]+)$", text, re.MULTILINE)[:1]
    names, numbers = (part.split(", ") for part in line)
    assert dict(zip(names, map(int, numbers), strict=True)) == {it.name: it.value for it in answers}
