"""What each process has once per app."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock import runtime
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.store import Store


@pytest.mark.timeout(30)
def test_signal_handler_may_send_a_task_while_the_first_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    app, of_handler = Celery(broker="redis://127.0.0.1:1"), []
    open_store = runtime.open_store

    def interrupted(settings: Settings) -> Store:
        monkeypatch.setattr(runtime, "open_store", open_store)
        of_handler.append(Runtime.of(app))
        return open_store(settings)

    monkeypatch.setattr(runtime, "open_store", interrupted)
    assert [Runtime.of(app)] == of_handler
    assert Runtime.of(app) is of_handler[0]
