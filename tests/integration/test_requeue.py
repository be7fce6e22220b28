"""A message that is put back is the same message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration import copies
from tests.integration.conftest import Shop


@pytest.fixture
def shop(redis_server: Any, shop_on: Any, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("C_FORCE_ROOT", "1")  # As root, which tests in a container are, Celery refuses pickle.
    queues = copies.queues("other", "mirror")
    made: Shop = shop_on(redis_server, accept_content=copies.ACCEPTED, task_queues=queues, singleton_lock_ttl=60.0)
    return made


def test_copy_is_the_message_on_redis(shop: Shop) -> None:
    copies.check(shop, "other", ["", "other"])
