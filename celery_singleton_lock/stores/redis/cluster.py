"""Connections of this process to a Redis Cluster: each call goes to the master of its slot, and follows a moved slot.

All keys of one lock are in one slot (their hash tag is the lock's name). The map of the slots is read from any node
when it is first needed, and again after a node failed or a slot had moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ConnectionError, MovedError, ReadOnlyError, RedisError

from celery_singleton_lock.stores.redis.connection import NO_ANSWER, Connection, alone
from celery_singleton_lock.stores.redis.script import Call, Command
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.redis.urls import PoolOf

T = TypeVar("T")

Address = tuple[str, int]

#: How often one call follows a slot that has moved, before it counts as not answered.
REDIRECTIONS = 5

#: Errors after which another node may be the master of a slot by now.
_REPLACED = (*NO_ANSWER, ClusterDownError, ReadOnlyError)


class Cluster:
    """A cluster of which some nodes are known.

    Args:
        start: nodes to ask for the others.
        pool_of: how to connect to a node.
    """

    def __init__(self, start: Sequence[Address], pool_of: PoolOf) -> None:
        self._start = tuple(start)
        #: The nodes of the map, to be asked for it in this order, before those it was made with.
        self._known: tuple[Address, ...] = ()
        self._pool_of = pool_of
        self._servers: dict[Address, Server] = {}
        #: Replaced whole, so that no mutex is needed: two threads that both read the map do no harm.
        self._slots: dict[int, Address] = {}
        #: The same, or what it was before it was forgotten.
        self._last_slots = self._slots
        self.step = self._server(self._start[0]).step

    def run(self, call: Call, *, step: float | None = None) -> Any:
        return self.followed(
            self._address_of(call.keys[0]), lambda server, asking: server.run(call, step=step, asking=asking)
        )

    def run_each(self, calls: Sequence[Call], *, step: float | None = None) -> list[Any]:
        answers: dict[int, Any] = {}
        by_address: dict[Address, list[int]] = {}
        for index, call in enumerate(calls):
            try:
                by_address.setdefault(self._address_of(call.keys[0]), []).append(index)
            except (RedisError, OSError) as error:
                answers[index] = alone(error)
        for address, indexes in by_address.items():
            try:
                with self.watching(address) as server:
                    given = server.run_each([calls[index] for index in indexes], step=step)
            except (RedisError, OSError) as error:
                given = [alone(error)] * len(indexes)
            self.learn(given, address)
            answers.update(zip(indexes, given, strict=True))
        return redirected([answers[index] for index in range(len(calls))], calls, partial(self.run, step=step))

    def server_of(self, key: str) -> ClusterPart:
        return ClusterPart(self, self._address_of(key))

    def slot_of(self, key: str) -> int:
        """Keys with the same slot can be named in one call."""
        return key_slot(key.encode())

    def place_of(self, key: str) -> Address | None:
        """The master that has the key, or had it when the map was last known; None if it never was."""
        return self._last_slots.get(self.slot_of(key))

    def servers(self) -> Sequence[ClusterPart]:
        """All masters, as they are now."""
        self._slots = {}
        return [ClusterPart(self, address) for address in self._masters()]

    def masters(self) -> Sequence[Server]:
        """All masters as single servers, which do not follow moved keys."""
        return [self._server(address) for address in self._masters()]

    def close(self) -> None:
        for server in [*self._servers.values()]:  # Other threads add some meanwhile.
            server.close()

    def followed(self, address: Address, ask: Callable[[Server, bool], T]) -> T:
        """What `ask` gets, from this server or from the one that the keys have moved to, or are about to move to."""
        asking = False
        for _ in range(REDIRECTIONS):
            try:
                with self.watching(address) as server:
                    return ask(server, asking)
            except AskError as moved:  # Or a MovedError, which is one.
                address, asking = _target(moved, address), not isinstance(moved, MovedError)
        raise ConnectionError(f"the keys moved {REDIRECTIONS} times during the request")

    @contextmanager
    def watching(self, address: Address) -> Iterator[Server]:
        """A master whose error says that others may know better where the slots are."""
        try:
            yield self._server(address)
        except (MovedError, *_REPLACED) as error:
            self.learn([error], address)
            raise

    def learn(self, answers: Sequence[Any], address: Address) -> None:
        """Learn from the errors of a master where the slots are."""
        for answer in answers:
            if isinstance(answer, MovedError) and self._slots:  # Or the map is read anew.
                self._slots = self._last_slots = {**self._slots, answer.slot_id: _target(answer, address)}
            elif isinstance(answer, _REPLACED):
                # Before the next call, and from this node at last.
                self._slots = {}
                self._put_last(address)

    def _masters(self) -> Sequence[Address]:
        return sorted(set(self._map().values()))

    def _address_of(self, key: str) -> Address:
        slot, slots = self.slot_of(key), self._map()
        try:
            return slots[slot]
        except KeyError:
            self._slots = {}
            raise ConnectionError(f"no node of the cluster has slot {slot}") from None

    def _server(self, address: Address) -> Server:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = Server(self._pool_of(*address))
        return server

    def _map(self) -> dict[int, Address]:
        if not (slots := self._slots):
            slots = self._slots = self._last_slots = self._read_map()
        return slots  # Another thread may have forgotten it meanwhile.

    def _put_last(self, last: Address) -> None:
        self._known = tuple(sorted(self._known, key=lambda each: each == last))

    def _read_map(self) -> dict[int, Address]:
        error: Exception = ConnectionError("the cluster has no nodes")
        for address in dict.fromkeys((*self._known, *self._start)):
            try:
                ranges = self._server(address).command("CLUSTER", "SLOTS")
            except (RedisError, OSError) as failed:
                error = alone(failed)
            else:
                if ranges:
                    return self._shown(ranges, address)
                error = ConnectionError("the node has left the cluster")
            self._put_last(address)
        try:
            raise error
        finally:
            del error  # It refers to this frame from now on; see `Connection.read`.

    def _shown(self, ranges: Sequence[Any], asked: Address) -> dict[int, Address]:
        """The map, as this node has shown it; others are asked first for the next one: it may have lost them."""
        there = dict.fromkeys(_named(node, asked) for _, _, *nodes in ranges for node in nodes)
        self._known = tuple(dict.fromkeys((*(each for each in self._known if each in there), *there)))
        self._put_last(asked)
        return {slot: _named(master, asked) for first, last, master, *_ in ranges for slot in range(first, last + 1)}


class ClusterPart:
    """What a cluster shows of one key, or of one master: a key that has moved is followed to where it is.

    Args:
        cluster: whose part it is.
        address: where to ask first.
    """

    def __init__(self, cluster: Cluster, address: Address) -> None:
        self._cluster = cluster
        self._address = address

    def run(self, call: Call) -> Any:
        return self._cluster.run(call)

    def command(self, *command: object) -> Any:
        return self._cluster.followed(self._address, lambda server, asking: server.command(*command, asking=asking))

    def command_each(self, commands: Sequence[Command]) -> list[Any]:
        with self._cluster.watching(self._address) as server:
            answers = server.command_each(commands)
        self._cluster.learn(answers, self._address)
        return redirected(answers, commands, lambda command: self.command(*command))

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._cluster.watching(self._address) as server, server.connection() as connection:
            yield connection


def redirected(answers: list[Any], asked: Sequence[T], again: Callable[[T], Any]) -> list[Any]:
    """The answers; what was answered that a key is elsewhere is asked `again`."""
    for index, answer in enumerate(answers):
        if isinstance(answer, AskError):  # Or a MovedError, which is one.
            try:
                answers[index] = again(asked[index])
            except (RedisError, OSError) as error:
                answers[index] = alone(error)
    return answers


def _target(moved: AskError, asked: Address) -> Address:
    """Where a key is, or is about to move to; a node that does not know its own name leaves it out."""
    return (moved.host or asked[0]), moved.port


def _named(node: Sequence[Any], asked: Address) -> Address:
    """The address of a node in the map, as `_target`."""
    host, port, *_ = node
    return (host.decode() if host else asked[0]), port
