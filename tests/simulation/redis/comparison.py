"""A model beside a real server: both get the same commands, and after each step their answers and data must agree.

The model's clock is the real server's, as TIME shows it between two steps. So values that depend on the time within a
step (a time to live, a fence) may differ, but only by the time that has passed on the real server since the first step.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Any

import hiredis

from celery_singleton_lock.stores.redis.connection import packed
from celery_singleton_lock.stores.redis.lock_answers import Answer
from celery_singleton_lock.stores.redis.script import Command
from tests.redis_server import RedisServer
from tests.simulation.redis.dataset import TYPES, Scores
from tests.simulation.redis.replies import shown
from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session

#: Numbers from here on may be times in ms; and from here on, times in µs.
_MS, _US = 1_000, 10**14

#: A key with at most this many µs to live counts as expiring.
_SHORT = 20_000

_NUMBER = re.compile(rb"-?[0-9]{4,}(\.[0-9]+)?")

#: A hold, perhaps without its last character: its fence is a time in µs.
_HOLD = re.compile(rb"(.+,)([0-9]{16})(\]?)", re.DOTALL)

#: When a waiter asked last (ms), and for how many copies.
_ASKED = re.compile(rb"([0-9]{13}) ([0-9]+)")

#: Shows all keys: name, type, ms to live, value.
_DUMP = b"""
local found = {}
for i, key in ipairs(redis.call('KEYS', '*')) do
  local kind, value = redis.call('TYPE', key).ok
  if kind == 'string' then value = redis.call('GET', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end
  found[i] = {key, kind, redis.call('PTTL', key), value}
end
return found
"""


class Difference(AssertionError):
    """The model's answer or data differ from the real server's."""


class RealSession:
    """A connection to the real server."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        # Otherwise commands behind a blocking command stay here until that command is acknowledged, 40 ms later.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def send(self, commands: Sequence[Command]) -> None:
        self._socket.sendall(b"".join(map(packed, commands)))

    def read(self) -> Any:
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._received())
        return answer

    def ask(self, *command: Any) -> Any:
        self.send([command])
        return self.read()

    def more(self) -> Any:
        """An unexpected answer; None if there is none."""
        self._socket.setblocking(False)
        try:
            self._reader.feed(self._received())
        except BlockingIOError:
            return None
        finally:
            self._socket.settimeout(20)
        answer = self._reader.gets()
        return None if answer is False else answer

    def _received(self) -> bytes:
        received = self._socket.recv(65_536)
        if not received:
            raise Difference("the real server has closed the connection")
        return received

    def close(self) -> None:
        self._socket.close()


class ModelSession:
    """A connection to the model, with its answers."""

    def __init__(self, model: RedisModel, number: int) -> None:
        self._reader = hiredis.Reader()
        self.session: Session = model.connect(self._reader.feed, address=f"127.0.0.1:{number}")

    def send(self, commands: Sequence[Command]) -> None:
        self.session.receive(b"".join(map(packed, commands)))

    def answers(self) -> list[Any]:
        found = []
        while (answer := self._reader.gets()) is not False:
            found.append(answer)
        return found


class Pair:
    """Both servers, empty, each with some clients.

    Args:
        server: the real server; it is emptied.
        control: a connection to it.
        clients: number of clients.
    """

    def __init__(self, server: RedisServer, control: RealSession, *, clients: int) -> None:
        self._control = control
        for command in (("FLUSHALL",), ("SCRIPT", "FLUSH")):
            control.ask(*command)
        self._now = self._began = self._time()
        self.model = RedisModel(lambda: self._now / 1_000_000, version=version_of(control))
        self._real = [RealSession(server) for _ in range(clients)]
        self._modelled = [ModelSession(self.model, number) for number in range(clients)]

    def step(self, client: int, commands: Sequence[Command]) -> None:
        """Let a client send some commands at once.

        Raises:
            Difference: see there.
        """
        self._now = self._time()
        self._modelled[client].send(commands)
        self._real[client].send(commands)
        while (timer := self.model.next_timer()) is not None:
            self._now = max(int(timer * 1_000_000) + 1_000, self._time())
            self.model.run_timers()
        self._compare()

    def _compare(self) -> None:
        expected = [each.answers() for each in self._modelled]
        found = [self._heard(real, len(answers)) for real, answers in zip(self._real, expected, strict=True)]
        self._outlive_the_short()
        dump = {key: rest for key, *rest in self._control.ask("EVAL", _DUMP, 0)}
        after = self._time()
        slack = (after - self._began) // 1000 + 2
        extra = [real.more() for real in self._real]
        if any(each is not None for each in extra):
            raise Difference(f"the real server answers {extra}, the model nothing")
        for number, (of_real, of_model) in enumerate(zip(found, expected, strict=True)):
            if not alike(of_real, of_model, slack):
                raise Difference(f"to client {number}: the real server answers {of_real}, the model {of_model}")
        self._compare_keys(dump, after // 1000, slack)

    def close(self) -> None:
        for real in self._real:
            real.close()
        for modelled in self._modelled:
            modelled.session.close()

    def _outlive_the_short(self) -> None:
        """Wait until keys that are about to expire have expired: otherwise the real server may still have them."""
        now = self._time()
        ends = self.model.dataset.ends_at.values()
        until = max((end for end in ends if end * 1000 < now + _SHORT), default=0) * 1000 + now - self._now + 2_000
        while self._time() <= until:
            pass

    def _heard(self, real: RealSession, count: int) -> list[Any]:
        answers: list[Any] = []
        try:
            while len(answers) < count:
                answers.append(real.read())
        except TimeoutError as error:
            raise Difference(f"the real server answers {answers} only, the model {count} times") from error
        return answers

    def _compare_keys(self, dump: dict[bytes, Any], now: int, slack: int) -> None:
        self._now = max(self._now, now * 1000)
        modelled = {}
        for key, value in self.model.dataset.values.items():
            end = self.model.dataset.ends_at.get(key)
            if end is None or end >= now:
                modelled[key] = [TYPES[value.__class__], -1 if end is None else end - now, _flat(value)]
        if sorted(dump) != sorted(modelled):
            raise Difference(f"the real server has the keys {sorted(dump)}, the model {sorted(modelled)}")
        for key, real in dump.items():
            (kind, left, value), (modelled_kind, modelled_left, modelled_value) = real, modelled[key]
            # A time to live is a time, however short it is.
            value, modelled_value = _in_one_order(kind, value), _in_one_order(modelled_kind, modelled_value)
            is_as_long = (left < 0) == (modelled_left < 0) and abs(left - modelled_left) <= slack
            if not (is_as_long and kind == modelled_kind and alike(value, modelled_value, slack)):
                raise Difference(f"at {key!r} the real server has {real}, the model {modelled[key]}")

    def _time(self) -> int:
        seconds, microseconds = self._control.ask("TIME")
        return int(seconds) * 1_000_000 + int(microseconds)


def _flat(value: Any) -> Any:
    """A value as it is in the dump."""
    if isinstance(value, Scores):
        return [part for member in value.in_order() for part in (member, shown(value[member]))]
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return value


def _in_one_order(kind: bytes, value: Any) -> Any:
    """The same; holds are in the order of their ends, which may differ by the slack, and a hash with long names in
    none.
    """
    if not isinstance(value, list) or not (kind == b"hash" or all(map(_HOLD.fullmatch, value[::2]))):
        return value
    return [part for pair in sorted(zip(value[::2], value[1::2], strict=True)) for part in pair]


def version_of(real: RealSession) -> str:
    found = re.search(rb"redis_version:(\S+)", real.ask("INFO", "server"))
    assert found
    return found[1].decode()


def _is_held(answer: list[Any]) -> bool:
    return [type(part) for part in answer] == [int, bytes, int] and answer[0] == Answer.HELD


def alike(real: Any, modelled: Any, slack: int = 0) -> bool:
    """Whether two answers are the same, apart from `slack` ms in values that may be times."""
    if isinstance(real, hiredis.ReplyError) and isinstance(modelled, hiredis.ReplyError):
        return str(real) == str(modelled)
    if isinstance(real, list) and isinstance(modelled, list):
        if real and all(isinstance(each, bytes) and b"{" in each for each in [*real, *modelled]):
            # These are names of keys, in any order.
            return sorted(real) == sorted(modelled)
        if _is_held(real) and _is_held(modelled):
            (_, value, left), (_, modelled_value, modelled_left) = real, modelled
            # Of two holds that end at nearly the same time, either is shown. A time to live is a time, however short.
            is_either = _HOLD.fullmatch(value) and _HOLD.fullmatch(modelled_value)
            is_as_long = (left < 0) == (modelled_left < 0) and abs(left - modelled_left) <= slack
            return bool(is_as_long and (is_either or alike(value, modelled_value, slack)))
        if real[:1] == [Answer.RECORD]:
            slack += 1000  # The record may date from the second before.
        return len(real) == len(modelled) and all(
            alike(each, other, slack) for each, other in zip(real, modelled, strict=True)
        )
    if type(real) is not type(modelled):
        return False
    if real == modelled:
        return True
    if isinstance(real, bytes):
        if (hold := _HOLD.fullmatch(real)) and (other := _HOLD.fullmatch(modelled)):
            return hold[1] == other[1] and abs(int(hold[2]) - int(other[2])) <= slack * 1000
        if (asked := _ASKED.fullmatch(real)) and (other := _ASKED.fullmatch(modelled)):
            return asked[2] == other[2] and abs(int(asked[1]) - int(other[1])) <= slack
        if not _NUMBER.fullmatch(real) or not _NUMBER.fullmatch(modelled):
            return False
        real, modelled = float(real), float(modelled)
    if isinstance(real, (int, float)):
        least = min(abs(real), abs(modelled))
        return least >= _MS and abs(real - modelled) <= (slack if least < _US else slack * 1000)
    return False
