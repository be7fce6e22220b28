"""The data that the worker's main process passes to the process that runs a task, along with its request.

The owner token is in the delivery info, and the message as it came is among the properties: no sender can write there,
and no retry takes them along. Only this module writes them, and reads the message; `message` reads the owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock._celery import DELAYED, queue_taken_from, without_delay
from celery_singleton_lock.task.message import OWNER, RequestLike, carried_in
from celery_singleton_lock.task.putback import Original

_ORIGINAL = "singleton_lock_original"

#: The most characters that a name may have in AMQP.
_MAX_NAME = 255


def give(message: Any, request: dict[str, Any], owner: str) -> None:
    """Put `message`, and the owner under which its delivery takes its lock, into the request that its task gets.

    The request of a copy says how the message was first sent: a retry of the task goes the way that it always went.
    A message of protocol 1, which has its times in its body, is not passed: it is made anew if it has to be put back.
    """
    delivery, way = message.delivery_info or {}, request["delivery_info"]
    way[OWNER] = owner  # Celery has just made it; no sender wrote any of it.
    if message.headers and "x-death" in message.headers:
        _forget_delays(message.headers)
        _forget_delays(request)
    exchange, routing_key = str(delivery.get("exchange") or ""), str(delivery.get("routing_key") or "")
    queue = "" if exchange else routing_key
    if (known := queue_taken_from(message)) is not None:
        queue = known.name
    if is_delayed := exchange.startswith(DELAYED):
        exchange = known.exchange.name if known is not None and known.exchange else exchange
        routing_key = without_delay(routing_key)
    if (is_delayed or not exchange) and (first := _sent_first(request)) is not None:
        exchange, routing_key = way["exchange"], way["routing_key"] = first
    if "task" not in (message.headers or {}):
        return
    # A plain tuple, and the properties as they are: each task pays for what is pickled here.
    place = (message.body, message.content_type, message.content_encoding, message.headers or {})
    properties = message.properties if isinstance(message.properties, Mapping) else {}
    request["properties"] = {**properties, _ORIGINAL: (*place, exchange, routing_key, queue)}


def original_of(request: RequestLike) -> Original | None:
    """The message as it came; None if our main process has not passed it (see `give`)."""
    properties = dict(request.properties or {})
    place = properties.pop(_ORIGINAL, None)
    return Original(properties, *place) if isinstance(place, tuple) else None


def without_ours(delivery_info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in delivery_info.items() if name != OWNER}


def _sent_first(request: Mapping[str, Any]) -> tuple[str, str] | None:
    """The exchange and routing key with which a copy's original was sent."""
    known = carried_in(request).get("put_back")
    if not isinstance(known, dict):
        return None
    exchange, routing_key = known.get("exchange"), known.get("routing_key")
    if not (isinstance(exchange, str) and isinstance(routing_key, str)):
        return None
    return (exchange, routing_key) if max(len(exchange), len(routing_key)) <= _MAX_NAME else None


def _forget_delays(headers: dict[str, Any]) -> None:
    """Drop what RabbitMQ has recorded of Celery's delays; what it recorded of a user's dead-letter exchange stays."""
    for which in ("first", "last"):
        if str(headers.get(f"x-{which}-death-queue") or "").startswith(DELAYED):
            for what in ("exchange", "queue", "reason"):
                headers.pop(f"x-{which}-death-{what}", None)
    deaths = headers.pop("x-death", None)
    if isinstance(deaths, list):
        others = [death for death in deaths if not str(_queue_of(death)).startswith(DELAYED)]
        if others:
            headers["x-death"] = others


def _queue_of(death: Any) -> Any:
    return death.get("queue") if isinstance(death, dict) else ""
