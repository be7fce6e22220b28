"""Where the messages of an app are: in its broker, and in its workers, by their own reports.

Redis can be searched. RabbitMQ does not show its messages, only how many there are: if none wait, and each consumer
answers, there are only those that the workers report. Whatever is uncertain is noted as a doubt, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from amqp import NotFound

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock._celery import messages_on_redis
from celery_singleton_lock.holder import OWNER_LENGTH, STEM_LENGTH

#: How many messages are read from Redis at once, and the time in seconds to read all of them.
PAGE, LIMIT = 100, 30.0

#: The queues on RabbitMQ in which Celery keeps messages that are due later, if there are quorum queues.
_CELERYS_DELAYED = tuple(f"celery_delayed_{level}" for level in range(28))


@dataclass(slots=True)
class Look:
    """The result of looking for messages.

    Attributes:
        seen: the names (see `name_in_message`) of the messages that were found.
        doubts: why there may be more.
        nodes: the nodes of the workers that answered.
    """

    seen: set[bytes] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)


def name_in_message(text: str) -> bytes:
    """The form in which to look for a task's id, or an owner token: as it is in a message between quotes."""
    # A Redlock's tokens end with the number of an attempt.
    return text.encode("utf-8", "surrogatepass")[: STEM_LENGTH if len(text) == OWNER_LENGTH else None]


def look_for(
    app: Any, names: Collection[bytes], task_ids: Iterable[str], *, alive: Collection[str], timeout: float
) -> Look:
    """Look once for messages, first in the broker and then in the workers, where they go.

    Args:
        app: the app whose messages these are.
        names: the names of the messages, see `name_in_message`.
        task_ids: their task ids, for the workers.
        alive: nodes of workers that are known to be alive: if one of them does not answer, that is a doubt.
        timeout: the seconds that workers have for each answer.
    """
    found = Look()
    try:
        with app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1)
            found.doubts += _several_brokers(app, connection)
            kind = connection.transport.driver_type
            if kind == "redis":
                _look_through(found, connection.default_channel, frozenset(names))
            _ask_workers(found, app, connection, task_ids, alive, timeout)
            if kind == "amqp":
                found.doubts += _depths(app, connection, _consumed(app, connection, found.nodes, timeout))
            elif kind != "redis":
                found.doubts.append(f"a broker of this kind ({kind}) does not show its messages")
    except Exception as error:  # noqa: BLE001 - every transport has its own errors
        found.doubts.append(f"the broker, or a worker, cannot be asked: {type(error).__name__}: {error}")
    return found


def _several_brokers(app: Any, reading: Any) -> Iterator[str]:
    with app.connection_for_write() as writing:
        # There are several Sentinels, too, but they have one master.
        several = len(reading.alt or ()) > 1 and reading.transport_cls != "sentinel"
        if several or reading.as_uri() != writing.as_uri():
            yield "messages may be on another broker: there are several"


def _look_through(found: Look, channel: Any, names: frozenset[bytes]) -> None:
    if not channel.ack_emulation:
        found.doubts.append("ack_emulation is off: the broker does not have what workers have taken")
    until = clock.now() + LIMIT
    for page in messages_on_redis(channel, PAGE):
        for message in page:
            found.seen |= names.intersection(_names_in(message))
        if clock.now() > until:
            found.doubts.append(f"the broker has more messages than can be searched in {LIMIT:g} s")
            return


def _names_in(message: bytes) -> Iterator[bytes]:
    """All texts between quotes: a message is JSON, which contains each text that needs no escape in this form."""
    for text in message.split(b'"'):
        yield text[:STEM_LENGTH] if len(text) == OWNER_LENGTH else text


def _ask_workers(
    found: Look, app: Any, connection: Any, task_ids: Iterable[str], alive: Collection[str], timeout: float
) -> None:
    inspect = app.control.inspect(connection=connection, timeout=timeout)
    expected = {*map(cleaned.text, inspect.ping() or {}), *alive}
    inspect.limit = len(expected) or None
    if not expected:
        return
    by_id = _by_node(inspect.query_task(*task_ids))
    due_later = _by_node(inspect.scheduled())  # `query_task` leaves these out before Celery 5.7.
    found.nodes = {node for node in by_id if isinstance(due_later.get(node), list)}
    for node in found.nodes:
        requests = by_id[node]
        found.seen |= {name_in_message(str(task_id)) for task_id in requests}
        found.seen |= {name_in_message(str(_id_of(entry))) for entry in due_later[node]}
    found.doubts += [f"worker {node} does not answer" for node in sorted(expected - found.nodes)]


def _by_node(answer: Any) -> dict[str, Any]:
    """The answers by node, without those that are errors."""
    answers = answer.items() if isinstance(answer, Mapping) else ()
    return {cleaned.text(node): its for node, its in answers if not (isinstance(its, Mapping) and "error" in its)}


def _id_of(entry: Any) -> Any:
    request = entry.get("request") if isinstance(entry, Mapping) else None
    return request.get("id") if isinstance(request, Mapping) else None


def _consumed(app: Any, connection: Any, nodes: Collection[str], timeout: float) -> dict[str, int]:
    """The queues that workers say they consume, and how many workers say so."""
    counts: dict[str, int] = {}
    if not nodes:
        return counts
    inspect = app.control.inspect(connection=connection, timeout=timeout, limit=len(nodes))
    for queues in _by_node(inspect.active_queues()).values():
        for queue in queues if isinstance(queues, list) else ():
            counts[str(queue["name"])] = counts.get(str(queue["name"]), 0) + 1
    return counts


def _routed_to(app: Any) -> Iterator[str]:
    """The queues of the app's tasks, without those that only a call names."""
    for name, task in app.tasks.items():
        own = {option: value for option in ("queue", "routing_key") if (value := getattr(task, option, None))}
        queue = app.amqp.router.route(own, name).get("queue")
        if queue is not None:
            yield queue.name


def _depths(app: Any, connection: Any, consumed: Mapping[str, int]) -> Iterator[str]:
    """Doubts about the queues that this app knows: messages that RabbitMQ does not show, and consumers that did not
    answer.
    """
    names = {*_routed_to(app), *app.amqp.queues, *consumed, *_CELERYS_DELAYED}
    for name in sorted(names):
        # A queue that does not exist closes the channel.
        with connection.channel() as channel:
            try:
                _, waiting, consumers = channel.queue_declare(name, passive=True)
            except NotFound:
                continue
        if waiting:
            yield f"{waiting} messages wait in the queue {name}, and RabbitMQ does not show which"
        if consumers > consumed.get(name, 0):
            yield f"the queue {name} has {consumers} consumers, but only {consumed.get(name, 0)} of them answer"
