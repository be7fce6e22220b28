"""Values that are both in a script and in Python are the same."""

from __future__ import annotations

import re
from enum import IntEnum
from importlib.resources import files
from json import loads
from typing import Any

import pytest

from celery_singleton_lock.holder import FENCE, LABEL, NEWER, ORDER, OWNER_LENGTH, Holder
from celery_singleton_lock.stores.redis.ledger import Claim
from celery_singleton_lock.stores.redis.lock_answers import Answer, Freed

HOLDER = Holder("id", 1, "node", 2, 3.0, 4, "process", sending="sending", label="label", order="order")

#: By its name in the scripts: what a holder has there.
PARTS: dict[str, Any] = {"RETRIES": 1, "REPLACED": 4, "TTL": 30.0, "FENCE": 7, "ORDER": "order", "NEWER": ["newer"]}


def text_of(script: str) -> str:
    return files("celery_singleton_lock.stores.redis").joinpath(f"scripts/{script}.lua").read_text()


def constants(script: str) -> dict[str, int]:
    """The numbers that a script has names for."""
    lines = re.findall(r"^local ([A-Z_, ]+) = ([0-9, ]+)$", text_of(script), re.MULTILINE)
    return {name: int(number) for line in lines for name, number in zip(*(it.split(", ") for it in line), strict=True)}


def test_parts_of_a_holder_are_where_python_writes_them() -> None:
    fields = [*loads(HOLDER.dumps(ttl=30.0, fence=7)), ["newer"]]
    assert [fields[place] for place in (FENCE, LABEL, ORDER, NEWER)] == [7, "label", "order", ["newer"]]
    named: set[str] = set()
    for script in ("acquire", "newest", "refuse", "renew"):
        known = constants(f"lock/{script}")
        assert known.get("OWNER_LENGTH", OWNER_LENGTH) == OWNER_LENGTH
        assert [name for name in PARTS.keys() & known.keys() if fields[known[name] - 1] != PARTS[name]] == []
        assert not re.search(r"fields\[\d", text_of(f"lock/{script}")), "a place without a name"
        named |= known.keys()
    assert named >= PARTS.keys()


@pytest.mark.parametrize(
    ("script", "answers"), [("lock/answers", Answer), ("lock/end", Freed), ("ledger/claim", Claim)], ids=str
)
def test_answers_have_the_same_numbers(script: str, answers: type[IntEnum]) -> None:
    (line,) = re.findall(r"^local ([A-Z_, ]+) = ([0-9, ]+)$", text_of(script), re.MULTILINE)[:1]
    names, numbers = (part.split(", ") for part in line)
    assert dict(zip(names, map(int, numbers), strict=True)) == {it.name: it.value for it in answers}
