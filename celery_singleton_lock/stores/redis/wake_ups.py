"""How a process is woken for many locks on Redis: one connection blocks on the lists of them all; in a cluster, one for
each hash slot.

The process has a place in the `:waiting` of each lock, as a waiter has, so that each release pushes an element. Redis
gives that to the client that has blocked longest; a process that knows of an older place passes it on, by pushing it
again. So nobody relies on what a dead process has left behind: a client that does not block gets nothing.
"""

from __future__ import annotations

import select
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import RedisError, ResponseError

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.redis import inspect, keyspace, lock_commands
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.connection import Connection
from celery_singleton_lock.stores.redis.lock_commands import WAITING_TTL, WAKE_TTL
from celery_singleton_lock.stores.redis.script import Command, ms
from celery_singleton_lock.stores.redis.server import Server, words_of
from celery_singleton_lock.stores.store import Freed, Place

logger = get_logger(__name__)

#: The most locks on a server, where all are named each time that the connection blocks; and on a cluster, where each
#: may need a separate connection.
MAX_LOCKS, MAX_CONNECTIONS = 500, 32

#: How often an element is passed on to somebody with an older place, at least, and at most; in between, as often as
#: there are others, since Redis gives it to each process in turn. After that its receiver takes it: the place was that
#: of a process that is gone.
MAX_PASSED_ON, MOST_PASSED_ON = 3, 100

#: In place of that number, for a lock that was found free, and that nobody was woken for.
LOOKED = 10**9

#: Seconds after which the places are taken anew, which shows that the connection still works, and finds whatever is
#: free: the cost of a wake-up that was lost, or that a holder did not send because it died.
REFRESH = WAITING_TTL / 3

#: Seconds for which the element that unblocks one of our own connections is kept.
NUDGE_TTL = 10.0


class RedisWakeUps:
    """A `WakeUps`.

    Args:
        servers: where the locks are.
        server: the name of that place, for messages.
    """

    def __init__(self, servers: Server | Cluster, server: str) -> None:
        self.most = MAX_CONNECTIONS if isinstance(servers, Cluster) else MAX_LOCKS
        self._servers = servers
        self._server = server
        self._name = new_owner()
        self._lines: dict[int, _Line] = {}
        #: The last error of a server, in this wait.
        self._failed: RedisError | OSError | None = None
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """In the child of a fork: leave the connections to the parent; nobody would listen here."""
        self._lines = {}

    def wait(
        self,
        places: Mapping[str, Place],
        interrupt: int,
        copies: Callable[[str], int],
        place_now: Callable[[str], Place | None],
    ) -> Sequence[Freed]:
        """See `WakeUps.wait`."""
        self._failed = None
        found = []
        for one in self._wait(places, interrupt, copies):
            try:
                if (freed := self._unless_for_another(one, places, place_now)) is not None:
                    found.append(freed)
            except (RedisError, OSError) as error:
                slot = self._servers.slot_of(keyspace.wake_key(one.key))
                self._drop(slot, self._lines.get(slot), error)
        if not found and (failed := self._failed) is not None:
            raise LockUnavailable(self._server, words_of(failed)) from failed
        return found

    def pass_on(self, freed: Freed) -> bool:
        """See `WakeUps.pass_on`."""
        if freed.passed_on >= max(freed.places, MAX_PASSED_ON):
            return False
        self._push(freed.key, freed.passed_on + 1)
        return True

    def give_back(self, key: str) -> None:
        """See `WakeUps.give_back`."""
        if (line := self._lines.get(self._servers.slot_of(keyspace.wake_key(key)))) is not None:
            line.forget(key)
        self._push(key, 0)

    def wake_if_free(self, key: str, limit: int) -> None:
        """See `WakeUps.wake_if_free`."""
        with suppress(RedisError, OSError):
            if self._servers.run(lock_commands.count(key)) < limit:
                self._push(key, 0)

    def leave(self) -> None:
        """See `WakeUps.leave`."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            try:
                for freed in line.leave():
                    # However often it was passed on: nobody here takes it.
                    self._push(freed.key, min(freed.passed_on + 1, MAX_PASSED_ON))
            except (RedisError, OSError) as error:
                line.drop(error)

    def _wait(self, places: Mapping[str, Place], interrupt: int, copies: Callable[[str], int]) -> list[Freed]:
        by_slot: defaultdict[int, dict[str, Place]] = defaultdict(dict)
        for key, place in places.items():
            by_slot[self._servers.slot_of(keyspace.wake_key(key))][key] = place
        for slot in by_slot:
            if slot not in self._lines:
                self._lines[slot] = _Line(self._servers, self._name)

        def stand(slot: int, line: _Line) -> list[Freed]:
            return line.stand(by_slot[slot], copies) if slot in by_slot else self._lines.pop(slot).leave()

        freed = self._in_each(stand) or self._in_each(lambda _, line: line.heard())
        if freed or self._failed is not None or not all(line.is_blocked for line in self._lines.values()):
            return freed
        due = min((line.due for line in self._lines.values()), default=0.0)
        poll = select.poll()
        for descriptor in (interrupt, *(each for line in self._lines.values() for each in line.descriptors)):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(due - clock.now(), 0.0) * 1000)
        return self._in_each(lambda _, line: line.heard())

    def _in_each(self, act: Callable[[int, _Line], Sequence[Freed]]) -> list[Freed]:
        """What is free in each hash slot; a server that does not answer does not hold up the locks of the others."""
        freed: list[Freed] = []
        for slot, line in [*self._lines.items()]:
            try:
                freed += act(slot, line)
            except (RedisError, OSError) as error:
                self._drop(slot, line, error)
        return freed

    def _unless_for_another(
        self, freed: Freed, places: Mapping[str, Place], place_now: Callable[[str], Place | None]
    ) -> Freed | None:
        """The lock for the first copy here; None if another process has an older place, and is woken now."""
        place = place_now(freed.key) or places.get(freed.key)
        if place is None:
            self.give_back(freed.key)
            return None
        if freed.passed_on == LOOKED:
            return freed
        waiting = keyspace.waiting_key(freed.key)
        endpoint = self._servers.server_of(waiting)
        # The others are to see its place, too: there may still be that of a copy that has begun. A place of 0 does not
        # wait any more.
        _, older, *many = endpoint.command_each(
            [
                ("ZADD", waiting, "XX", ms(place.since), self._name),
                ("ZRANGEBYSCORE", waiting, "(0", f"({ms(place.since)}", "LIMIT", 0, 1),
                *inspect.those_there(freed.key),
            ]
        )
        if isinstance(older, Exception):
            _unless_strange(older)
            return freed
        freed = freed._replace(places=min(sum(each for each in many if isinstance(each, int)), MOST_PASSED_ON))
        if not older:
            return freed._replace(place=place)
        if self.pass_on(freed):
            return None
        # Nobody has taken it; a process that is there, and was busy with another lock, will take its place again.
        endpoint.command_each([("ZADD", waiting, "XX", 0, older[0]), ("HDEL", keyspace.line_key(freed.key), older[0])])
        return freed

    def _push(self, key: str, passed_on: int) -> None:
        wake = keyspace.wake_key(key)
        with suppress(RedisError, OSError):
            # A release pushes 1.
            self._servers.server_of(wake).command_each(
                [("RPUSH", wake, passed_on + 1), ("PEXPIRE", wake, ms(WAKE_TTL))]
            )

    def _drop(self, slot: int, line: _Line | None, error: RedisError | OSError) -> None:
        self._failed = error
        self._lines.pop(slot, None)
        if line is not None:
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
        #: When to look for processes that are gone next, and the commands that remove what such have left behind.
        self._look_due = clock.now() + inspect.LONG_GONE
        self._removals: list[Command] = []
        self._places: dict[str, Place] = {}
        #: Locks whose wake-up found no use here.
        self._forgotten: set[str] = set()
        #: Locks where somebody else has put a value in place of the wake-ups: nothing can wait for them.
        self._strange: set[str] = set()
        self._exits = ExitStack()
        self._connection: Connection | None = None
        self._nudge = ""
        self._nudged = False
        self._answer: Any = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors to watch."""
        return [] if self._connection is None else [self._connection.fileno()]

    @property
    def is_blocked(self) -> bool:
        """Whether it is blocked, as far as is known."""
        return self._connection is not None and self._connection.unanswered > 0 and self._answer is None

    def stand(self, places: dict[str, Place], copies: Callable[[str], int]) -> list[Freed]:
        """Block for these places; the locks that are free already, or were heard of meanwhile.

        How many copies wait is written together with the places, and never causes a command alone.
        """
        is_blocked = self._connection is not None and self._connection.unanswered
        is_due = clock.now() >= self.due
        if is_blocked and places == self._places and not is_due:
            return []
        if freed := self._unblock():
            return freed
        connection = self._connected(next(iter(places)))
        connection.wait_at_most(self._servers.step)
        known = () if is_due else self._places.keys() - self._forgotten
        came = [key for key in places if key not in known]
        left = [key for key in self._places if key not in places]
        moved = {key: place for key, place in places.items() if is_due or place != self._places.get(key)}
        commands = [*self._registered(moved, copies), *self._left(left), *self._removals]
        looks = [_look(key, places[key].limit) for key in came]
        if is_due:  # Not whenever it blocks anew: there may always be another lock to block for.
            self._strange, self.due = set(), clock.now() + REFRESH
        # The earlier ones first, in their order: Redis takes the first list that has an element.
        self._places = {key: places[key] for key in (*self._places, *places) if key in places}
        self._forgotten = set()
        wakes = [keyspace.wake_key(key) for key in self._places if key not in self._strange]
        lines = self._lines_to_tidy()
        connection.send(*commands, *looks, *(("HGETALL", line) for line in lines), ("BLPOP", *wakes, self._nudge, 0))
        for _ in commands:
            _read(connection)
        held = [connection.read() for _ in looks]
        gone = {line: inspect.left_behind(_read(connection)) for line in lines}
        self._removals = [("HDEL", line, *names) for line, names in gone.items() if names]
        # Nobody was notified of locks that were freed before.
        return [Freed(key, LOOKED) for key, count in zip(came, held, strict=True) if count < places[key].limit]

    def has_heard(self) -> bool:
        """Whether the answer is there, which may have come together with others."""
        connection = self._connection
        if self._answer is None and connection is not None and connection.unanswered and not connection.is_quiet:
            connection.wait_at_most(self._servers.step)
            self._answer = _read(connection)
        return self._answer is not None

    def heard(self) -> list[Freed]:
        """The lock that it was woken for, if it was."""
        if not self.has_heard():
            return []
        answer, self._answer = self._answer, None
        if isinstance(answer, ResponseError):
            self._look_for_strangers(answer)
            return []
        name, value = answer
        if name == self._nudge.encode():
            self._nudged = False
            return []
        key = next((key for key in self._places if keyspace.wake_key(key).encode() == name), None)
        if key is None:
            return []
        # Last in the next list of keys.
        self._places[key] = self._places.pop(key)
        return [Freed(key, _count(value))]

    def forget(self, key: str) -> None:
        """Take the place anew, if it is still wanted: look whether the lock is free."""
        self._forgotten.add(key)

    def leave(self) -> list[Freed]:
        """Leave every line; what was heard meanwhile."""
        freed = self._unblock()
        if self._connection is not None and self._places:
            self._connection.wait_at_most(self._servers.step)
            self._connection.answers(self._left(self._places))
        self._connection, self._places = None, {}
        self._exits.close()
        return freed

    def drop(self, error: BaseException) -> None:
        """End the connection, whatever is under way."""
        self._connection, self._places = None, {}
        with suppress(RedisError, OSError):
            self._exits.__exit__(type(error), error, error.__traceback__)

    def _lines_to_tidy(self) -> list[str]:
        """Once in a while, the lines from which it removes processes that are gone."""
        if clock.now() < self._look_due:
            return []
        self._look_due = clock.now() + inspect.LONG_GONE
        return [keyspace.line_key(key) for key in self._places]

    def _look_for_strangers(self, refused: ResponseError) -> None:
        """Find the locks that it cannot block for, so that it blocks for the others."""
        connection = self._connected(next(iter(self._places)))
        connection.wait_at_most(self._servers.step)
        types = connection.answers([("TYPE", keyspace.wake_key(key)) for key in self._places])
        known = self._strange
        self._strange = {key for key, its in zip(self._places, types, strict=True) if its not in (b"list", b"none")}
        if self._strange <= known:
            raise refused
        logger.debug("somebody else's values are where wake-ups should be, for %s", ", ".join(self._strange))

    def _unblock(self) -> list[Freed]:
        """Free the connection for other commands; the locks that it was woken for."""
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
            self._answer = _read(connection)
        return self.heard()

    def _connected(self, key: str) -> Connection:
        if self._connection is None:
            self._nudge = keyspace.nudge_key(key, self._name)
            self._connection = self._exits.enter_context(self._servers.server_of(self._nudge).connection())
        return self._connection

    def _registered(self, places: Mapping[str, Place], copies: Callable[[str], int]) -> list[Command]:
        return [
            command
            for key, place in places.items()
            for command in (
                ("ZADD", keyspace.waiting_key(key), ms(place.since), self._name),
                ("PEXPIRE", keyspace.waiting_key(key), ms(WAITING_TTL)),
                ("HSET", keyspace.line_key(key), self._name, inspect.written(copies(key), place.since)),
                ("PEXPIRE", keyspace.line_key(key), ms(WAITING_TTL)),
            )
        ]

    def _left(self, keys: Mapping[str, Place] | Sequence[str]) -> list[Command]:
        return [
            command
            for key in keys
            for command in (
                ("ZREM", keyspace.waiting_key(key), self._name),
                ("HDEL", keyspace.line_key(key), self._name),
            )
        ]


def _look(key: str, limit: int) -> Command:
    """Asks how many hold a lock."""
    return ("EXISTS", keyspace.run_key(key)) if limit == 1 else lock_commands.count(key).by_text


def _read(connection: Connection) -> Any:
    """The next answer; an answer about a foreign value takes its place."""
    try:
        return connection.read()
    except ResponseError as error:
        _unless_strange(error)
        return error


def _unless_strange(error: Exception) -> None:
    """Raise it, unless it says that a value is of another type: only that lock is to suffer from it."""
    if not str(error).startswith("WRONGTYPE"):
        raise error


def _count(value: bytes) -> int:
    """How often it was passed on."""
    return max(int(value[:9]) - 1, 0) if value.isdigit() else 0
