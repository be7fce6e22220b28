"""Records what kombu does with a message: that it is in a queue, and that a worker has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.transport import redis as transport

from celery_singleton_lock.task.message import carried_in
from tests.storm import history

#: Places of the lock in the header of a message that follows another message.
FOLLOWS = 8


def report_queue() -> None:
    """Make kombu record what is put into a queue, and what a worker has taken and noted.

    It takes a message off the list before it notes that: a worker killed or cut off in between loses the message.
    """
    append, put, restore = transport.QoS.append, transport.Channel._put, transport.Channel._do_restore_message

    def taken(self: Any, message: Any, delivery_tag: str) -> None:
        append(self, message, delivery_tag)
        _note("taken", message.headers)

    def queued(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        put(self, queue, message, **kwargs)
        _note("queued", message["headers"])

    def restored(self: Any, payload: Any, *args: Any, **kwargs: Any) -> None:
        restore(self, payload, *args, **kwargs)
        _note("queued", payload["headers"])

    transport.QoS.append, transport.Channel._put = taken, queued
    transport.Channel._do_restore_message = restored


def _note(event: str, headers: Mapping[str, Any]) -> None:
    queued = carried_in(headers).get("queue")
    # A follower has no lock: there are two more places; the last names the message that it follows.
    owner = {"owner": queued[2]} if queued and len(queued) < FOLLOWS else {}
    history.write(event, message=headers.get("id"), retries=headers.get("retries", 0), **owner)
