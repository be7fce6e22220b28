"""Connections of this process to a Redis Cluster: each call goes to the master of its slot, and follows a moved slot.

All keys of one lock are in one slot (their hash tag is the lock's name). The map of the slots is read from any node
when it is first needed, and again after a node failed or a slot had moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ConnectionError, MovedError, ReadOnlyError, RedisError

from celery_singleton_lock.stores.redis.connection import NO_ANSWER, Connection, alone, unless_error
from celery_singleton_lock.stores.redis.script import Call, Command
from celery_singleton_lock.stores.redis.server import Server

Address = tuple[str, int]

#: Makes a pool for one node.
PoolOf = Callable[[str, int], ConnectionPool]

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
        #: Whom to ask for the map, in this order.
        self._known = self._start
        self._pool_of = pool_of
        self._nodes: dict[Address, Node] = {}
        #: Replaced whole, so that no mutex is needed: two threads that both read the map do no harm.
        self._slots: dict[int, Address] = {}
        #: Whether the map is thought to be right; otherwise it is read anew before the next call.
        self._is_right = False
        self.step = self.node(self._start[0]).step

    def run(self, call: Call, *, step: float | None = None) -> Any:
        return unless_error(self.run_each([call], step=step)[0])

    def run_each(self, calls: Sequence[Call], *, step: float | None = None) -> list[Any]:
        answers: dict[int, Any] = {}
        by_node: dict[Node, list[int]] = {}
        for index, call in enumerate(calls):
            try:
                by_node.setdefault(self.server_of(call.keys[0]), []).append(index)
            except (RedisError, OSError) as error:
                answers[index] = alone(error)
        for node, indexes in by_node.items():
            try:
                given = node.run_each([calls[index] for index in indexes], step=step)
            except (RedisError, OSError) as error:
                given = [alone(error)] * len(indexes)
            answers.update(zip(indexes, given, strict=True))
        return [answers[index] for index in range(len(calls))]

    def server_of(self, key: str) -> Node:
        """The master that has the key."""
        slot = self.slot_of(key)
        if (address := self._map().get(slot)) is None:
            self._is_right = False
            raise ConnectionError(f"no node of the cluster has slot {slot}")
        return self.node(address)

    def slot_of(self, key: str) -> int:
        """Keys with the same slot can be named in one call."""
        return key_slot(key.encode())

    def place_of(self, key: str) -> Address | None:
        """The master that has the key, or had it when the map was last known; None if it never was."""
        return self._slots.get(self.slot_of(key))

    def servers(self) -> Sequence[Node]:
        """All masters, as they are now."""
        self._is_right = False
        return [self.node(address) for address in sorted(set(self._map().values()))]

    def close(self) -> None:
        for node in [*self._nodes.values()]:  # Other threads add some meanwhile.
            node.close()

    def node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(self, address, self._pool_of)
        return node

    def learn(self, answer: object, address: Address) -> None:
        """Learn from what a node has answered, or raised, where the slots are."""
        if isinstance(answer, MovedError):
            self._slots = {**self._slots, answer.slot_id: _target(answer, address)}
        elif isinstance(answer, _REPLACED):
            # Before the next call, and from this node at last.
            self._is_right = False
            self._put_last(address)

    def _map(self) -> dict[int, Address]:
        if not self._is_right:
            self._slots = unless_error(self._read_map())
            self._is_right = True
        return self._slots

    def _put_last(self, last: Address) -> None:
        self._known = tuple(sorted(self._known, key=lambda each: each == last))

    def _read_map(self) -> dict[int, Address] | Exception:
        error: Exception = ConnectionError("the cluster has no nodes")
        for address in self._known:
            # Others are asked first for the next one: this node may have lost them.
            self._put_last(address)
            try:
                if ranges := self.node(address).command("CLUSTER", "SLOTS"):
                    return self._shown(ranges, address)
                error = ConnectionError("the node has left the cluster")
            except (RedisError, OSError) as failed:
                error = alone(failed)
        return error

    def _shown(self, ranges: Sequence[Any], asked: Address) -> dict[int, Address]:
        """The map, as this node has shown it."""
        there = [_named(node, asked) for _, _, *nodes in ranges for node in nodes]
        known = [each for each in self._known if each in there or each in self._start]
        self._known = tuple(dict.fromkeys((*(each for each in there if each not in known), *known)))
        return {slot: _named(master, asked) for first, last, master, *_ in ranges for slot in range(first, last + 1)}


class Node(Server):
    """A node of a cluster. What it does not have is asked of the node that it names, which has it or is about to."""

    def __init__(self, cluster: Cluster, address: Address, pool_of: PoolOf) -> None:
        super().__init__(pool_of(*address))
        # Weak, or the connections of a client's locks would not go with the client.
        self._cluster: Cluster = weakref.proxy(cluster)
        self._address = address

    def run_each(self, calls: Sequence[Call], *, step: float | None = None) -> list[Any]:
        answers = super().run_each(calls, step=step)
        return [call.understood(self._followed(one, call.by_text)) for call, one in zip(calls, answers, strict=True)]

    def command_each(self, commands: Sequence[Command]) -> list[Any]:
        answers = super().command_each(commands)
        return [self._followed(answer, command) for command, answer in zip(commands, answers, strict=True)]

    def open(self, step: float | None = None) -> Connection:
        try:
            return super().open(step)
        except (RedisError, OSError) as error:
            self._cluster.learn(error, self._address)
            raise

    def give_back(self, connection: Connection, error: BaseException | None) -> None:
        self._cluster.learn(error, self._address)
        super().give_back(connection, error)

    def _followed(self, answer: Any, command: Command) -> Any:
        """The answer to a command, or an error; that of another node, if this one has named it."""
        node = self
        for _ in range(REDIRECTIONS):
            self._cluster.learn(answer, node._address)
            if not isinstance(answer, AskError):  # Nor a MovedError, which is one.
                return answer
            commands: list[Command] = [command] if isinstance(answer, MovedError) else [("ASKING",), command]
            node = self._cluster.node(_target(answer, node._address))
            try:
                answer = Server.command_each(node, commands)[-1]
            except (RedisError, OSError) as error:
                answer = alone(error)
        return ConnectionError(f"the keys moved {REDIRECTIONS} times during the request")


def _target(moved: AskError, asked: Address) -> Address:
    """Where a key is, or is about to move to; a node that does not know its own name leaves it out."""
    return (moved.host or asked[0]), moved.port


def _named(node: Sequence[Any], asked: Address) -> Address:
    """The address of a node in the map, as `_target`."""
    host, port, *_ = node
    return (host.decode() if host else asked[0]), port
