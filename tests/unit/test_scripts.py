"""The numbers that stand for the answers to a release are the same in Lua and in Python."""

from __future__ import annotations

import re
from importlib.resources import files

from celery_singleton_lock.stores.redis.lock_answers import NOT_OURS


def test_answers_have_the_same_numbers() -> None:
    """A release that nobody waits for works as well if the scripts call that otherwise."""
    text = files("celery_singleton_lock.stores.redis").joinpath("scripts/lock/free.lua").read_text()
    (line,) = re.findall(r"^local ([A-Z_, ]+) = ([0-9, ]+)$", text, re.MULTILINE)[:1]
    names, numbers = (part.split(", ") for part in line)
    assert dict(zip(names, map(int, numbers), strict=True)) == {"NOT_OURS": NOT_OURS, "FREED": 1}
