"""Locks on one Redis (6.2 or newer) or Valkey server.

One key per lock, `<base>:run`, holding the owner and who that is; taken and freed by one script each. Beside it, all
with a time to live and all in one hash slot: `:fence` (the counter of fencing tokens), `:waiting` (somebody waits),
`:wake` (a list that a release pushes to, so that exactly one waiter wakes), and `:done:<message>` for each message that
was carried out.

Commands go out on redis-py's `Connection`s directly: its client would repeat a `SET NX` whose reply was lost, and wait
up to minutes. Here each try is short, and only what may be repeated is. Owners and scripts make that everything.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.backoff import FullJitterBackoff, NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from celery_singleton_lock import clock
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.lease import FIRST, OWNER_LENGTH, Done, Heir, Held, Holder, Lease, Mark, heir_of

T = TypeVar("T")

#: Seconds that one step (connect, send, read) may take, unless the connection options say less.
STEP_TIMEOUT = 1.0

#: Tries of an acquire or release; with `STEP_TIMEOUT` a hung server costs a few seconds, not minutes.
TRIES = 3

#: Seconds that a waiter sleeps at most before it looks again: a wake-up that dies with its receiver costs no more.
WAIT_SLICE = 4.0

#: Seconds that ":waiting" outlives the look that set it: longer than the slice, so that it is never missed.
WAITING_TTL = 6.0

#: Seconds that an unclaimed wake-up is kept.
WAKE_TTL = 1.0

#: Seconds that a fence counter is kept after the last acquire. Without it the next one starts at the server's time,
#: which is higher as long as that clock was not set back by more than this.
FENCE_TTL = 3600.0

#: Leases in one call of the renew script, which blocks the server for as long as it runs.
RENEW_BATCH = 200

#: Keys that the server looks at in one step of a search for locks.
SCAN_BATCH = 500

#: What our scripts and parsing depend on, whatever the URL or the transport options say.
_FIXED_OPTIONS: Mapping[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}


class _Script:
    """A `.lua` file, known to the server by its digest."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath("scripts", f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


_ACQUIRE, _RENEW, _RELEASE = _Script("acquire"), _Script("renew"), _Script("release")


class RedisStore:
    """A `Store` on the Redis server at `url`.

    Args:
        url: `redis://`, `rediss://`, `unix://` or `redis+socket://`, with user and password, as kombu spells them.
        options: connection options of redis-py (`socket_timeout`, `ssl_ca_certs`, `socket_keepalive`, …).

    Raises:
        InvalidOption: the URL or an option is not one that redis-py knows. Nothing is connected to yet.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, server: str) -> None:
        self.server = server
        connection_class, connection_options = _connection_options(url, options or {}, server)
        self._step = min(STEP_TIMEOUT, connection_options.get("socket_timeout") or STEP_TIMEOUT)
        self._commands = _Connections(connection_class, connection_options, step=self._step)
        self._waits = _Connections(connection_class, connection_options, step=WAIT_SLICE + STEP_TIMEOUT)
        self._renewals = _Connections(connection_class, connection_options, step=self._step)

    def acquire(
        self, key: str, owner: str, *, ttl: float, holder: Holder, waiting: bool = False, once: bool = False
    ) -> Lease | Held | Done:
        keys = [f"{key}:run", f"{key}:fence", f"{key}:waiting"]
        if once:
            keys.append(_done_key(key, holder.message))
        fence_ttl, waiting_ms = _ms(max(FENCE_TTL, 2 * ttl)), _ms(WAITING_TTL) if waiting else 0
        heir = heir_of(holder) if holder.attempt > FIRST else ""
        args = (owner, heir, holder.dumps(), _ms(ttl), fence_ttl, waiting_ms)

        def attempt() -> Lease | Held | Done:
            sent_at = clock.now()
            answer, value, *pttl = self._commands.run(_ACQUIRE, keys, args)
            if answer == 0:
                return _held(value, pttl[0])
            if answer == 2:
                return Done(value, max(pttl[0], 0) / 1000)
            if clock.now() - sent_at > ttl / 3:
                # Trust counts from sending; what is left of it is too little to start work on.
                raise TimeoutError(f"the answer took longer than a third of the ttl of {ttl:g} s")
            return Lease(key, owner, ttl=ttl, fence=value, sent_at=sent_at)

        try:
            return self._patiently(attempt)
        except LockUnavailable:
            raise
        except BaseException:
            # Interrupted (a time limit, a shutdown) between sending and reading: it may be ours, and nobody knows.
            with suppress(LockUnavailable):
                self._release(key, owner)
            raise

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        renewed: list[bool] = []
        step = min(timeout, self._step)
        for start in range(0, len(leases), RENEW_BATCH):
            batch = leases[start : start + RENEW_BATCH]
            args = [arg for lease in batch for arg in (lease.owner, _ms(lease.ttl))]
            names = [f"{lease.key}:run" for lease in batch]
            try:
                sent_at, answers = self._renew(names, args, step)
            except (RedisError, OSError) as error:
                raise self._unavailable(error) from error
            for lease, answer in zip(batch, answers, strict=True):
                if answer:
                    lease.extend(sent_at)
            renewed += map(bool, answers)
        return renewed

    def release(self, lease: Lease, *, mark: Mark | None = None, heir: Heir | None = None) -> bool:
        return self._release(lease.key, lease.owner, mark, heir)

    def wait(self, key: str, timeout: float) -> None:
        try:
            self._waits.command("BLPOP", f"{key}:wake", max(min(timeout, WAIT_SLICE), 0.001))
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def holds(self, prefix: str) -> Iterator[tuple[str, Held]]:
        cursor, pattern = b"0", f"{prefix}:*:run"
        try:
            while True:
                cursor, names = self._commands.command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_BATCH)
                for name in names:
                    yield from self._hold(name)
                if cursor == b"0":
                    return
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        for connections in (self._commands, self._waits, self._renewals):
            connections.close()

    def _renew(self, names: Sequence[str], args: Sequence[object], step: float) -> tuple[float, list[int]]:
        """When it was sent, and the answers."""
        sent_at = clock.now()
        try:
            return sent_at, self._renewals.run(_RENEW, names, args, step=step)
        except ConnectionError:
            # The connection was broken, which says nothing about the server: a new one is opened for this.
            sent_at = clock.now()
            return sent_at, self._renewals.run(_RENEW, names, args, step=step)

    def _hold(self, name: bytes) -> Iterator[tuple[str, Held]]:
        try:
            value, pttl = self._commands.command("GET", name), self._commands.command("PTTL", name)
        except ResponseError:
            return  # A foreign key of another type.
        if value is not None:
            yield name.decode(errors="replace").removesuffix(":run"), _held(value, pttl)

    def _release(self, key: str, owner: str, mark: Mark | None = None, heir: Heir | None = None) -> bool:
        keys = [f"{key}:run", f"{key}:waiting", f"{key}:wake"]
        args: list[object] = [owner, _ms(WAKE_TTL), "", 0, "", 0]
        if mark is not None:
            keys.append(_done_key(key, mark.message))
            args[2:4] = mark.record, _ms(mark.seconds)
        if heir is not None:
            args[4:6] = heir_of(heir.holder) + heir.holder.dumps(), _ms(heir.seconds)
        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            released = self._commands.run(_RELEASE, keys, args)
            # Gone on a repeated release: the first one worked, and only its reply was lost.
            return bool(released) or tries > 1

        return self._patiently(attempt)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, again if the server did not answer, and say so if it never does."""
        try:
            retry = Retry(FullJitterBackoff(cap=0.5, base=0.02), TRIES - 1, supported_errors=_TRANSIENT)
            return retry.call_with_retry(attempt, _give_up_if_refused)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> LockUnavailable:
        return LockUnavailable(self.server, f"{type(error).__name__}: {error}")


class _Connections:
    """Connections of this process to the server, each used by one thread at a time, opened when needed."""

    def __init__(self, connection_class: type[Connection], options: Mapping[str, Any], *, step: float) -> None:
        self._class = connection_class
        self._options = options
        self._step = step
        self._free: deque[Connection] = deque()
        self._pid = os.getpid()

    def run(self, script: _Script, keys: Sequence[str], args: Sequence[object], *, step: float | None = None) -> Any:
        """Run a script by its digest, or by its text where the server does not know it yet."""
        try:
            return self.command("EVALSHA", script.sha, len(keys), *keys, *args, step=step)
        except NoScriptError:
            return self.command("EVAL", script.text, len(keys), *keys, *args, step=step)

    def command(self, *command: object, step: float | None = None) -> Any:
        """Send one command and read its answer."""
        connection = self._take(step or self._step)
        try:
            connection.send_command(*command)  # type: ignore[no-untyped-call]
            answer = connection.read_response()
        except ResponseError:
            self._free.append(connection)
            raise
        except BaseException:
            # Half a conversation: its answer must not be read as that to the next command.
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        self._free.append(connection)
        return answer

    def close(self) -> None:
        while self._free:
            self._free.pop().disconnect()  # type: ignore[no-untyped-call]

    def _take(self, step: float) -> Connection:
        if self._pid != os.getpid():
            # Forked: these sockets are the parent's. Dropped unclosed, since closing would shut down its TLS.
            self._free, self._pid = deque(), os.getpid()
        try:
            connection = self._free.pop()
        except IndexError:
            return self._open(step)
        if connection.socket_timeout != step:
            connection.disconnect()  # type: ignore[no-untyped-call]
            return self._open(step)
        return connection

    def _open(self, step: float) -> Connection:
        connect = min(step, self._options.get("socket_connect_timeout") or STEP_TIMEOUT)
        options = {**self._options, "socket_timeout": step, "socket_connect_timeout": connect}
        return self._class(**options, retry=Retry(NoBackoff(), 0))


#: Errors after which the same command may succeed. READONLY: a failover is under way, reconnect.
_TRANSIENT = (ConnectionError, TimeoutError, ReadOnlyError, OSError)


def _give_up_if_refused(error: Exception) -> None:
    """Between two tries: a wrong password is not a matter of patience."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        raise error


def _held(value: bytes, pttl: int) -> Held:
    owner, holder = value[:OWNER_LENGTH].decode(errors="replace"), Holder.loads(value[OWNER_LENGTH:])
    return Held(holder, owner, max(pttl, 0) / 1000)


def _done_key(key: str, message: str) -> str:
    return f"{key}:done:{message}"


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)


def _connection_options(
    url: str, options: Mapping[str, Any], server: str
) -> tuple[type[Connection], Mapping[str, Any]]:
    try:
        from_url = dict(parse_url(_as_redis_py_spells(url)))  # type: ignore[no-untyped-call]
        connection_class = from_url.pop("connection_class", Connection)
        merged = {**from_url, **options, **_FIXED_OPTIONS}
        connection_class(**merged, retry=Retry(NoBackoff(), 0))
    except (ValueError, TypeError, RedisError) as error:
        raise InvalidOption(
            f"setting singleton_lock_backend is {server!r}, with the transport options "
            f"{sorted(options)}: {_without_password(str(error), url)}; allowed: what redis-py's connections take"
        ) from None
    return connection_class, merged


def _as_redis_py_spells(url: str) -> str:
    """kombu's spellings of a Redis URL, in redis-py's."""
    scheme, netloc, path, query, _ = urlsplit(url)
    given = dict(parse_qsl(query))
    if scheme in ("redis", "rediss") and not path.strip("/").isdigit() and path.strip("/"):
        raise ValueError(f"the database {path.strip('/')!r} is not a number")
    if scheme == "redis+socket":
        scheme = "unix"
    if "virtual_host" in given:
        given["db"] = given.pop("virtual_host").strip("/")
    if "ssl_cert_reqs" in given:
        given["ssl_cert_reqs"] = given["ssl_cert_reqs"].removeprefix("CERT_").lower()
    return f"{scheme}://{netloc}{path}?{urlencode(given)}"


def _without_password(text: str, url: str) -> str:
    try:
        password = urlsplit(url).password
    except ValueError:
        return "the URL cannot be read"
    return text.replace(password, "**") if password else text
