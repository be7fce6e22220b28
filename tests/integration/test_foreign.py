"""A value that this package did not write is at a lock's key: it is said in words, and left alone."""

from __future__ import annotations

import json
import re

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockConflict
from tests.integration.conftest import Shop, until
from tests.integration.operators import EXCLUSIVE, ask
from tests.patience import LIMIT

#: How it is called everywhere.
WORDS = "something that this package did not write"

#: What was said before: nobody, nowhere, since 1970.
NONSENSE = re.compile(r"task None|on None|for \d{9,}")


@pytest.fixture
def key(shop: Shop) -> str:
    """The key of the lock of "report"."""
    return str(json.loads(ask(shop, "explain", "--json", EXCLUSIVE, "report").stdout)["key"])


def copy_of(shop: Shop, policy: str) -> object:
    return shop.send("exclusive", "report", singleton_lock={"on_conflict": policy})


@pytest.mark.parametrize("value", [b"hello", b"x" * 40, b'{"a": 1}', b"0" * 32 + b"[1, 2]"], ids=str)
def test_a_text(shop: Shop, key: str, value: bytes) -> None:
    shop.conf["singleton_lock_blocked_after"] = 2
    with shop.locks() as client:
        client.set(f"{key}:run", value, ex=1000)
    (worker,) = shop.start("one")
    with pytest.raises(TaskRevokedError, match=WORDS):
        copy_of(shop, "skip").get(timeout=LIMIT)
    with pytest.raises(LockConflict, match=WORDS) as caught:
        copy_of(shop, "raise").get(timeout=LIMIT)
    assert caught.value.task_id is None
    waiting = copy_of(shop, "retry")
    until(lambda: waiting.id in shop.refused("retry"))
    until(lambda: f"was refused 2 times in a row: {key} (job='report') is held by {WORDS}" in worker.log)

    for shown in (ask(shop, "list"), ask(shop, "show", key), ask(shop, "explain", EXCLUSIVE, "report")):
        assert WORDS in shown.stdout or " foreign " in shown.stdout
        assert not NONSENSE.search(shown.stdout)
    (line,) = map(json.loads, ask(shop, "list", "--json").stdout.splitlines())
    assert (line["foreign"], line["task_id"], line["held_for"]) == (True, None, None)
    assert WORDS in ask(shop, "release", "--yes", "--force", key).stdout
    assert not NONSENSE.search(worker.log)

    with shop.locks() as client:
        assert client.get(f"{key}:run") == value, "nothing is freed for a stranger"
        client.delete(f"{key}:run")
    assert waiting.get(timeout=LIMIT) == "report"
