"""Records what kombu does with a message: that it is in a queue, and that a worker has it."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as transport

from tests.storm import history


def report_queue() -> None:
    """Make kombu record what is put into a queue, and what a worker has taken and noted.

    It takes a message off the list before it notes that: a worker killed in between loses the message.
    """
    append, put, restore = transport.QoS.append, transport.Channel._put, transport.Channel._do_restore_message

    def taken(self: Any, message: Any, delivery_tag: str) -> None:
        append(self, message, delivery_tag)
        history.write("taken", message=message.headers.get("id"))

    def queued(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        put(self, queue, message, **kwargs)
        history.write("queued", message=message["headers"].get("id"))

    def restored(self: Any, payload: Any, *args: Any, **kwargs: Any) -> None:
        restore(self, payload, *args, **kwargs)
        history.write("queued", message=payload["headers"].get("id"))

    transport.QoS.append, transport.Channel._put = taken, queued
    transport.Channel._do_restore_message = restored
