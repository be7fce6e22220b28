"""How a process is woken for many locks on Redis: one connection blocks on the lists of them all, in a cluster one for
each hash slot.

It stands in the `:waiting` of each lock as a waiter does, so that each release pushes an element. Redis gives that to
whoever has blocked longest; a process that knows of an older place passes it on, by pushing it again. So nothing that a
dead process has left behind is ever relied upon: who does not block is given nothing.
"""

from __future__ import annotations

import select
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import RedisError, TimeoutError

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.bells import Place, Ring
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.connection import Connection
from celery_singleton_lock.stores.redis.lock_commands import WAITING_TTL, WAKE_TTL
from celery_singleton_lock.stores.redis.script import Command, ms
from celery_singleton_lock.stores.redis.server import Server, words_of

logger = get_logger(__name__)

#: Locks of a server, all of which are named each time that the connection blocks; and of a cluster, where each may need
#: a connection of its own.
MAX_LOCKS, MAX_CONNECTIONS = 500, 32

#: How often an element is passed on to somebody with an older place. Then whoever has it takes it, and the place was
#: that of one who is gone.
MAX_PASSED_ON = 3

#: Of a lock that was found free, and that nobody was woken for.
LOOKED = MAX_PASSED_ON + 1

#: Seconds after which the places are taken anew, the connection shows that it still carries something, and whatever is
#: free is found: what a wake-up costs that was lost, or that a holder who died did not send.
REFRESH = WAITING_TTL / 3

#: Seconds for which the element is kept that unblocks a connection of our own.
NUDGE_TTL = 10.0


class RedisBells:
    """A `Bells`.

    Args:
        servers: where the locks are.
        server: where that is, for messages.
    """

    def __init__(self, servers: Server | Cluster, server: str) -> None:
        self.most = MAX_CONNECTIONS if isinstance(servers, Cluster) else MAX_LOCKS
        self._servers = servers
        self._server = server
        self._name = new_owner()
        self._lines: dict[int, _Line] = {}
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """In the child of a fork: what the parent is told there, nobody would hear here."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.forsake()

    def wait(self, places: Mapping[str, Place], interrupt: int) -> Sequence[Ring]:
        """See `Bells.wait`."""
        try:
            return self._wait(places, interrupt)
        except (RedisError, OSError) as error:
            self._drop(error)
            raise LockUnavailable(self._server, words_of(error)) from error

    def pass_on(self, ring: Ring) -> bool:
        """See `Bells.pass_on`."""
        if ring.passed_on >= MAX_PASSED_ON:
            return False
        self._push(ring.key, ring.passed_on + 1)
        return True

    def give_back(self, key: str) -> None:
        """See `Bells.give_back`."""
        if (line := self._lines.get(self._servers.slot_of(keyspace.wake_key(key)))) is not None:
            line.forget(key)
        # Whoever is busy takes it now.
        self._push(key, MAX_PASSED_ON)

    def leave(self) -> None:
        """See `Bells.leave`."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            try:
                for ring in line.leave():
                    self.pass_on(ring)
            except (RedisError, OSError) as error:
                line.drop(error)

    def _wait(self, places: Mapping[str, Place], interrupt: int) -> list[Ring]:
        by_slot: defaultdict[int, dict[str, Place]] = defaultdict(dict)
        for key, place in places.items():
            by_slot[self._servers.slot_of(keyspace.wake_key(key))][key] = place
        for slot in by_slot:
            if slot not in self._lines:
                self._lines[slot] = _Line(self._servers, self._name)
        rings: list[Ring] = []
        for slot in [*self._lines]:
            if slot in by_slot:
                rings += self._lines[slot].stand(by_slot[slot])
            else:
                rings += self._lines.pop(slot).leave()
        if not rings:
            rings = self._heard(interrupt)
        return [ring for ring in rings if not self._is_for_another(ring, places)]

    def _heard(self, interrupt: int) -> list[Ring]:
        due = min((line.due for line in self._lines.values()), default=0.0)
        if not any(line.has_heard() for line in self._lines.values()):
            poll = select.poll()
            for descriptor in (interrupt, *(each for line in self._lines.values() for each in line.descriptors)):
                poll.register(descriptor, select.POLLIN)
            poll.poll(max(due - clock.now(), 0.0) * 1000)
        return [ring for line in self._lines.values() for ring in line.heard()]

    def _is_for_another(self, ring: Ring, places: Mapping[str, Place]) -> bool:
        """Whether somebody has an older place, who is woken now."""
        place = places.get(ring.key)
        if place is None:
            self.give_back(ring.key)
            return True
        if ring.passed_on == LOOKED:
            return False
        waiting = keyspace.waiting_key(ring.key)
        endpoint = self._servers.server_of(waiting)
        # Those of 0 wait no more.
        older = endpoint.command("ZRANGEBYSCORE", waiting, "(0", f"({ms(place.since)}", "LIMIT", 0, 1)
        if not older or older[0] == self._name.encode():
            return False
        if ring.passed_on < MAX_PASSED_ON:
            return self.pass_on(ring)
        # Nobody has come forward; one that is there, and was busy with another lock, will say so again.
        endpoint.command("ZADD", waiting, "XX", 0, older[0])
        return False

    def _push(self, key: str, passed_on: int) -> None:
        wake = keyspace.wake_key(key)
        with suppress(RedisError, OSError):
            # A release pushes 1.
            self._servers.server_of(wake).command_each(
                [("RPUSH", wake, passed_on + 1), ("PEXPIRE", wake, ms(WAKE_TTL))]
            )

    def _drop(self, error: Exception) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.drop(error)


class _Line:
    """The places in one hash slot, and the connection that blocks for them.

    Attributes:
        due: when the places are to be taken anew, on `clock.now()`.
    """

    def __init__(self, servers: Server | Cluster, name: str) -> None:
        self.due = 0.0
        self._servers = servers
        self._name = name
        self._places: dict[str, Place] = {}
        #: Those of which a wake-up found no use here.
        self._forgotten: set[str] = set()
        self._exits = ExitStack()
        self._connection: Connection | None = None
        self._nudge = ""
        self._nudged = False
        self._answer: Any = None

    @property
    def descriptors(self) -> list[int]:
        """To be watched."""
        return [] if self._connection is None else [self._connection.fileno()]

    def stand(self, places: dict[str, Place]) -> list[Ring]:
        """Block for these places; the locks that are free already, or were heard of meanwhile."""
        is_blocked = self._connection is not None and self._connection.unanswered
        if is_blocked and places == self._places and clock.now() < self.due:
            return []
        if rings := self._unblock():
            return rings
        connection = self._connected(next(iter(places)))
        connection.wait_at_most(self._servers.step)
        known = self._places.keys() - self._forgotten if clock.now() < self.due else ()
        came = [key for key in places if key not in known]
        left = [key for key in self._places if key not in places]
        commands = [*self._registered(places), *self._left(left)]
        looks = [("EXISTS", *(keyspace.run_key(key, slot) for slot in range(places[key].limit))) for key in came]
        keys = [*places]
        blocks = ("BLPOP", *map(keyspace.wake_key, keys), self._nudge, 0)
        self._places, self._forgotten, self.due = dict(places), set(), clock.now() + REFRESH
        connection.send(*commands, *looks, blocks)
        for _ in commands:
            connection.read()
        held = [connection.read() for _ in looks]
        # What was freed before nobody was told of.
        return [Ring(key, LOOKED) for key, slots in zip(came, held, strict=True) if slots < places[key].limit]

    def has_heard(self) -> bool:
        """Whether the answer is there, which may have come together with others."""
        connection = self._connection
        if self._answer is None and connection is not None and connection.unanswered:
            connection.wait_at_most(0.0)
            with suppress(TimeoutError):
                self._answer = connection.read()
        return self._answer is not None

    def heard(self) -> list[Ring]:
        """The lock that it was woken for, if it was."""
        if not self.has_heard():
            return []
        (name, value), self._answer = self._answer, None
        if name == self._nudge.encode():
            self._nudged = False
            return []
        key = next((key for key in self._places if keyspace.wake_key(key).encode() == name), None)
        if key is None:
            return []
        # Last in the next list of keys, of which Redis takes the first that has an element.
        self._places[key] = self._places.pop(key)
        return [Ring(key, _count(value))]

    def forget(self, key: str) -> None:
        """Take the place anew, if it is still wanted: look whether the lock is free."""
        self._forgotten.add(key)

    def leave(self) -> list[Ring]:
        """Leave every line; what was heard meanwhile."""
        rings = self._unblock()
        if self._connection is not None and self._places:
            self._connection.wait_at_most(self._servers.step)
            self._connection.answers(self._left(self._places))
        self._connection, self._places = None, {}
        self._exits.close()
        return rings

    def drop(self, error: BaseException) -> None:
        """End the connection, whatever is under way."""
        self._connection, self._places = None, {}
        with suppress(RedisError, OSError):
            self._exits.__exit__(type(error), error, error.__traceback__)

    def forsake(self) -> None:
        """In the child of a fork: leave the connection to the parent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forsake()

    def _unblock(self) -> list[Ring]:
        """Have the connection free for other commands; what it was woken for."""
        connection = self._connection
        if connection is None or not (connection.unanswered or self._answer):
            return []
        if not self.has_heard():
            if not self._nudged:
                self._servers.server_of(self._nudge).command_each(
                    [("RPUSH", self._nudge, 1), ("PEXPIRE", self._nudge, ms(NUDGE_TTL))]
                )
                self._nudged = True
            connection.wait_at_most(self._servers.step)
            self._answer = connection.read()
        return self.heard()

    def _connected(self, key: str) -> Connection:
        if self._connection is None:
            self._nudge = keyspace.nudge_key(key, self._name)
            self._connection = self._exits.enter_context(self._servers.server_of(self._nudge).connection())
        return self._connection

    def _registered(self, places: Mapping[str, Place]) -> list[Command]:
        is_due = clock.now() >= self.due
        return [
            command
            for key, place in places.items()
            if is_due or self._places.get(key) != place
            for command in (
                ("ZADD", keyspace.waiting_key(key), ms(place.since), self._name),
                ("PEXPIRE", keyspace.waiting_key(key), ms(WAITING_TTL)),
            )
        ]

    def _left(self, keys: Mapping[str, Place] | Sequence[str]) -> list[Command]:
        return [("ZREM", keyspace.waiting_key(key), self._name) for key in keys]


def _count(value: bytes) -> int:
    """How often it was passed on."""
    return max(int(value) - 1, 0) if value.isdigit() else 0
