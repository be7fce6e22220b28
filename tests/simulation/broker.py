"""A broker that keeps a message until it is acknowledged, and redelivers it if that does not happen in time; and
Celery's access to it, as a virtual transport of kombu.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, virtual

from tests.simulation import inside
from tests.simulation.scheduler import Simulation, simulation

TRANSPORT_ALIASES["simulated"] = "tests.simulation.broker:Transport"


@dataclass(eq=False)
class Delivery:
    """A message in the hands of a consumer."""

    tag: int
    message: dict[str, Any]
    consumer: Consumer
    redelivered: bool


class Consumer:
    """A worker as the broker sees it.

    Args:
        take: called with each delivery.
        prefetch: most unacknowledged messages that it takes, besides those that wait for their time.
        on_cut: called when its connection is gone, with the seconds until it can get a new one.

    Attributes:
        connections: number of its previous connections.
    """

    def __init__(
        self,
        broker: Broker,
        take: Callable[[Delivery], None],
        prefetch: int,
        on_cut: Callable[[float], None],
    ) -> None:
        self.broker, self.take, self.prefetch, self.on_cut = broker, take, prefetch, on_cut
        self.unacked: dict[int, Delivery] = {}
        self.alive = True
        self.connections = 0

    def ack(self, tag: int) -> None:
        """Acknowledge a message: whether and when the broker gets that depends on the network."""
        self.broker.acknowledge(self, tag, None)

    def reject(self, tag: int, requeue: bool) -> None:
        """Give it back, or drop it."""
        self.broker.acknowledge(self, tag, requeue)

    def close(self) -> None:
        """Its connection is gone for good: its messages are redelivered."""
        self.alive = False
        self.broker.lost(self)

    def cut(self, seconds: float) -> None:
        """Its connection is gone, and for some seconds it cannot get a new one."""
        self.connections += 1
        self.broker.lost(self)
        self.on_cut(seconds)

    def prefetch_more(self, count: int) -> None:
        """Take up to this many more; the broker gets that a moment later."""
        self.prefetch += count
        if count > 0:
            self.broker.look_again()

    def cancel(self) -> None:
        """Take no more messages, but keep those that it has."""
        self.broker.unsubscribe(self)


class Broker:
    """The queue, and the consumer of each message.

    Attributes:
        visibility: seconds after which an unacknowledged message is redelivered.
        deaf_until: until when it does not confirm messages that are put back; it may have them all the same.
        lose_acks: how many of the next acknowledgements are lost.
        in_turns: whether the consumers get messages in turn, or the first one as many as it takes.
    """

    def __init__(self, run: Simulation, *, visibility: float = 60.0) -> None:
        self.run, self.visibility = run, visibility
        #: Messages, and whether each was delivered before.
        self.queue: deque[tuple[dict[str, Any], bool]] = deque()
        self.consumers: list[Consumer] = []
        #: Consumers that take no more messages.
        self._leaving: list[Consumer] = []
        self.lose_acks = 0
        self.deaf_until = 0.0
        self.shuffle = self.in_turns = False
        #: By id: how often a message was sent.
        self.put_as: Counter[str] = Counter()
        self.refuses = False
        #: Stands between sending programs and the broker: gets a message, and puts it into the queue.
        self.entrance: Callable[[dict[str, Any]], None] | None = None
        #: Called, for the checkers, with each message that is sent, and whether the broker takes it.
        self.on_put: list[Callable[[dict[str, Any], bool], None]] = []

    def put(self, message: dict[str, Any]) -> None:
        """Take a message that somebody sends."""
        for on_put in self.on_put:
            on_put(message, not self.refuses)
        if self.refuses:
            raise ConnectionRefusedError("the broker takes nothing")
        message = pickle.loads(pickle.dumps(message))
        headers = message.get("headers") or {}
        self.put_as[str(headers.get("id"))] += 1
        self.run.note("sends", f"{headers.get('id')} retries={headers.get('retries')} eta={headers.get('eta')}")
        self.queue.append((message, False))
        self.look_again()

    def subscribe(self, consumer: Consumer) -> None:
        if consumer not in self.consumers:
            self.consumers.append(consumer)
        self.look_again()

    def unsubscribe(self, consumer: Consumer) -> None:
        if consumer in self.consumers:
            self.consumers.remove(consumer)
            self._leaving.append(consumer)

    def look_again(self) -> None:
        """Deliver what can be delivered."""
        self.run.after(self._delay(), self._deliver)

    def acknowledge(self, consumer: Consumer, tag: int, requeue: bool | None) -> None:
        if self.lose_acks > 0:
            self.lose_acks -= 1
            self.run.strikes("acknowledgement lost")
            self.run.note("loses an acknowledgement", str(tag), by="broker")
            return
        self.run.after(self._delay(), lambda: self._acknowledged(consumer, tag, requeue))

    def lost(self, consumer: Consumer) -> None:
        for those in (self.consumers, self._leaving):
            if consumer in those:
                those.remove(consumer)
        unacked, consumer.unacked = consumer.unacked, {}
        self.queue.extendleft((delivery.message, True) for delivery in reversed(unacked.values()))
        self.look_again()

    def lose(self, number: int | None = None) -> list[dict[str, Any]]:
        """Lose all messages in the queue, or one of them; returns the lost messages."""
        waiting = [message for message, _ in self.queue]
        if number is not None and waiting:
            del self.queue[at := number % len(waiting)]
            return [waiting[at]]
        self.queue.clear()
        return waiting

    def ids(self) -> set[str]:
        """The ids of all messages in the queue and in workers."""
        held = [it.message for consumer in (*self.consumers, *self._leaving) for it in consumer.unacked.values()]
        waiting = [message for message, _ in self.queue]
        return {str(message["headers"].get("id")) for message in (*held, *waiting)}

    def is_empty(self) -> bool:
        """Whether there is no message in the queue or a worker."""
        held = any(consumer.unacked for consumer in (*self.consumers, *self._leaving))
        return not held and not self.queue

    def _delay(self) -> float:
        return self.run.rng.uniform(0.0002, 0.002)

    def _acknowledged(self, consumer: Consumer, tag: int, requeue: bool | None) -> None:
        delivery = consumer.unacked.pop(tag, None)
        if delivery is not None and requeue:
            self.queue.appendleft((delivery.message, True))
        self._deliver()

    def _deliver(self) -> None:
        while self._is_one_delivered():
            pass

    def _is_one_delivered(self) -> bool:
        """Deliver a message, if there is one, to the first consumer that has room for it."""
        for consumer in self.consumers if self.queue else ():
            if consumer.alive and len(consumer.unacked) < consumer.prefetch:
                if self.shuffle:
                    self.queue.rotate(self.run.rng.randrange(len(self.queue)))
                if self.in_turns:
                    self.consumers.remove(consumer)
                    self.consumers.append(consumer)
                self._give(consumer, *self.queue.popleft())
                return True
        return False

    def _give(self, consumer: Consumer, message: dict[str, Any], redelivered: bool) -> None:
        delivery = Delivery(self.run.next_number(), message, consumer, redelivered)
        consumer.unacked[delivery.tag] = delivery
        self.run.after(self.visibility, lambda: self.deliver_again(delivery))
        connection = consumer.connections

        def arrive() -> None:
            if consumer.alive and consumer.connections == connection:
                consumer.take(delivery)

        self.run.after(self._delay(), arrive)

    def deliver_again(self, delivery: Delivery) -> None:
        """Redeliver a message, though its consumer may still have it."""
        if delivery.consumer.unacked.pop(delivery.tag, None) is not None:
            self.run.note("delivers again", str(delivery.message["headers"].get("id")), by="broker")
            self.queue.append((delivery.message, True))
            self._deliver()


def _is_put_back(headers: Mapping[str, Any]) -> bool:
    """Whether the package has put it back."""
    return inside.put_back_of(headers).retries is not None


class Channel(virtual.Channel):
    """A channel of a simulated connection; a worker sets `consumer`."""

    do_restore = False
    consumer: Consumer | None = None

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        broker: Broker = simulation().broker  # type: ignore[attr-defined]
        if broker.entrance is not None:
            broker.entrance(message)
            return
        is_heard = broker.run.now >= broker.deaf_until or not _is_put_back(message.get("headers") or {})
        if is_heard or broker.run.rng.random() < 0.5:
            broker.put(message)
        if not is_heard:
            raise OSError("the broker does not answer")

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        if self.consumer is not None:
            self.consumer.ack(delivery_tag)

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        if self.consumer is not None:
            self.consumer.reject(delivery_tag, requeue)

    def basic_qos(self, *_: Any, **__: Any) -> None:
        """Do nothing: the consumer knows its prefetch."""


class Transport(virtual.Transport):
    """`simulated://`."""

    Channel = Channel
    state = virtual.BrokerState()

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.state = Transport.state
