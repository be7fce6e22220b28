"""The content of the events, which others read as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from celery_singleton_lock import LockConflict, signals
from celery_singleton_lock.worker import events


@pytest.mark.parametrize(("remaining", "expected"), [(2.5, 2.5), (math.inf, None)])
def test_conflict_with_a_lock_that_never_expires_is_valid_json(
    monkeypatch: pytest.MonkeyPatch, remaining: float, expected: float | None
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "_send", lambda *_, **details: sent.append(details))
    conflict = LockConflict("k", "other", remaining)
    signals.lock_conflict.send(sender=None, task_id="id", key="k", conflict=conflict, policy="skip")
    assert [json.loads(json.dumps(details, allow_nan=False)) for details in sent] == [
        {"policy": "skip", "holder": "other", "remaining": expected}
    ]
