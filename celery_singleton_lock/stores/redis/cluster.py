"""Connections of this process to a Redis Cluster: each call goes to the master of its slot, and follows a moved slot.

All keys of one lock are in one slot (their hash tag is the lock's name). The map of the slots is read from any node
when it is first needed, and again after a node failed or a slot had moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ConnectionError, MovedError, RedisError, ResponseError

from celery_singleton_lock.stores.redis.address import PoolOf
from celery_singleton_lock.stores.redis.connection import NO_ANSWER, Connection, alone
from celery_singleton_lock.stores.redis.script import Call, Command
from celery_singleton_lock.stores.redis.server import Server

Address = tuple[str, int]

#: How often one call follows a slot that has moved, before it counts as not answered.
REDIRECTIONS = 5

#: Errors after which another node may be the master of a slot by now.
_REPLACED = (*NO_ANSWER, ClusterDownError)


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
        #: The node that has shown the map, if it is known.
        self._shown_by: Address | None = None
        self._pool_of = pool_of
        self._servers: dict[Address, Server] = {}
        #: Replaced whole, so that no mutex is needed: two threads that both read the map do no harm.
        self._slots: dict[int, Address] = {}
        #: The same, or what it was before it was forgotten.
        self._last_slots = self._slots
        self.step = self._server(self._start[0]).step

    def run(self, call: Call, *, step: float | None = None) -> Any:
        return self._followed(
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
                given = self._server(address).run_each([calls[index] for index in indexes], step=step)
            except (RedisError, OSError) as error:
                self._forget(address)
                given = [alone(error)] * len(indexes)
            if any(isinstance(answer, _REPLACED) for answer in given):
                self._forget(address)
            answers.update(zip(indexes, given, strict=True))
        for index, call in enumerate(calls):
            if isinstance(answers[index], AskError):  # Or a MovedError, which is one.
                try:
                    answers[index] = self.run(call, step=step)
                except (RedisError, OSError) as error:
                    answers[index] = alone(error)
        return [answers[index] for index in range(len(calls))]

    def server_of(self, key: str) -> ClusterPart:
        return ClusterPart(self, self._address_of(key))

    def slot_of(self, key: str) -> int:
        """Keys with the same slot can be named in one call."""
        return key_slot(key.encode())

    def place_of(self, key: str) -> Address | None:
        """The master that has the key, or had it when the map was last known; None if it never was."""
        return self._last_slots.get(key_slot(key.encode()))

    def servers(self) -> Sequence[ClusterPart]:
        """All masters, as they are now."""
        self._forget()
        return [ClusterPart(self, address) for address in self._masters()]

    def masters(self) -> Sequence[Server]:
        """All masters as single servers, which do not follow moved keys."""
        return [self._server(address) for address in self._masters()]

    def answers(self, address: Address, commands: Sequence[Command]) -> list[Any]:
        """The answers of a master to some commands, or of the master that has the key now, if it has moved."""
        try:
            answers = self._server(address).command_each(commands)
        except NO_ANSWER:
            self._forget(address)
            raise
        if any(isinstance(answer, ClusterDownError) for answer in answers):
            self._forget(address)
        for index, command in enumerate(commands):
            if isinstance(answers[index], AskError):
                try:
                    answers[index] = self._followed(address, partial(_ask, command))
                except ResponseError as error:
                    answers[index] = error
        return answers

    @contextmanager
    def connection_to(self, address: Address) -> Iterator[Connection]:
        """A connection to a master, for one thread; an error on it says where the key is now."""
        try:
            with self._server(address).connection() as connection:
                yield connection
        except MovedError as moved:
            self._learn(moved, address)
            raise
        except _REPLACED:
            self._forget(address)
            raise

    def close(self) -> None:
        for server in [*self._servers.values()]:  # Other threads add some meanwhile.
            server.close()

    def _followed(self, address: Address, ask: Callable[[Server, bool], Any]) -> Any:
        """What `ask` gets, from this server or from the one that the keys have moved to, or are about to move to."""
        asking = False
        for _ in range(REDIRECTIONS):
            try:
                return ask(self._server(address), asking)
            except MovedError as moved:  # Before AskError, of which it is a subclass in redis-py.
                address, asking = self._learn(moved, address), False
            except AskError as moving:
                address, asking = (moving.host or address[0], moving.port), True
            except _REPLACED:
                self._forget(address)
                raise
        raise ConnectionError(f"the keys moved {REDIRECTIONS} times during the request")

    def _learn(self, moved: MovedError, asked: Address) -> Address:
        address = (moved.host or asked[0], moved.port)
        if slots := self._slots:  # Or it is read anew.
            self._slots = self._last_slots = {**slots, moved.slot_id: address}
        return address

    def _masters(self) -> Sequence[Address]:
        return sorted(set(self._map().values()))

    def _address_of(self, key: str) -> Address:
        slot, slots = key_slot(key.encode()), self._map()
        try:
            return slots[slot]
        except KeyError:
            self._forget()
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

    def _forget(self, *doubted: Address) -> None:
        """Read the map anew before the next call, last from these nodes and the one that has shown it: they may have
        lost the others, which may have replaced them by now.
        """
        self._put_last({*doubted, self._shown_by})
        self._shown_by, self._slots = None, {}

    def _put_last(self, last: Collection[Address | None]) -> None:
        self._known = tuple(sorted(self._known, key=lambda each: each in last))

    def _read_map(self) -> dict[int, Address]:
        error: Exception | None = None
        for address in dict.fromkeys((*self._known, *self._start)):
            try:
                ranges = self._server(address).command("CLUSTER", "SLOTS")
            except (RedisError, OSError) as failed:
                error = failed
            else:
                if ranges:
                    return self._shown(ranges, address)
                error = ConnectionError("the node has left the cluster")
            self._put_last({address})
        try:
            raise error or ConnectionError("the cluster has no nodes")
        finally:
            del error  # It refers to this frame from now on; see `Connection.read`.

    def _shown(self, ranges: Sequence[Any], asked: Address) -> dict[int, Address]:
        """The map, as this node has shown it."""
        there = dict.fromkeys(_named(node, asked) for _, _, *nodes in ranges for node in nodes)
        self._known = tuple(dict.fromkeys((*(each for each in self._known if each in there), *there)))
        self._shown_by = asked
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
        (answer,) = self.command_each([command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def command_each(self, commands: Sequence[Command]) -> list[Any]:
        return self._cluster.answers(self._address, commands)

    def connection(self) -> AbstractContextManager[Connection]:
        return self._cluster.connection_to(self._address)


def _ask(command: Command, server: Server, asking: bool) -> Any:
    return server.command(*command, asking=asking)


def _named(node: Sequence[Any], asked: Address) -> Address:
    """The address of a node in the map; a node that does not know its own name leaves it out."""
    host, port, *_ = node
    return (host.decode() if host else asked[0]), port
