"""A server with invalid answers: they lead to nothing but `LockUnavailable`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from redis.exceptions import InvalidResponse, ResponseError

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands, pending_calls, repeater
from celery_singleton_lock.stores.redis.redlock import commands
from celery_singleton_lock.stores.redis.redlock.store import RedlockStore
from celery_singleton_lock.stores.redis.script import Call, Script
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.fuzz.targets.answers import KEY, VALUE, PlayedServer, Player, as_resp
from tests.patience import LIMIT, sleepless

RECORD = Record("id:0.0", b"x", 60.0)


class Fixed(Player):
    """Gives fixed answers to some commands, and answers others as a server does."""

    def __init__(self, answers: dict[object, bytes]) -> None:
        super().__init__()
        self.answers = {it.sha.encode() if isinstance(it, Script) else it: said for it, said in answers.items()}

    def answer(self, command: Sequence[bytes]) -> bytes:
        name = command[1] if command[0] == b"EVALSHA" else command[0]
        return self.answers.get(name) or super().answer(command)


@pytest.fixture(params=["server", "redlock"])
def of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store on servers with these answers."""
    monkeypatch.setattr(clock, "sleep", sleepless())
    monkeypatch.setattr(pending_calls.PendingCalls, "add", lambda *_, **__: None)
    monkeypatch.setattr(repeater.Repeater, "start", lambda self: None)
    for limit in ("CONNECT", "CONNECT_ALL", "MAX_ANSWER"):  # However busy the machine is.
        monkeypatch.setattr(f"celery_singleton_lock.stores.redis.redlock.store.{limit}", LIMIT)
    stores: list[Any] = []

    def made(answers: dict[object, bytes]) -> Any:
        servers = [PlayedServer(Fixed(answers)) for _ in range(1 if request.param == "server" else 3)]
        is_one = request.param == "server"
        stores.append(RedisStore(servers[0], "s") if is_one else RedlockStore(servers, "s", memory=None))
        return stores[-1]

    yield made
    for store in stores:
        store.close()


def asked() -> LockRequest:
    return LockRequest(KEY, new_owner(), ttl=20 * LIMIT, holder=Holder("id"))


QUESTIONS = (lock_commands.ACQUIRE, commands.VOTE)


@pytest.mark.parametrize(
    "answer",
    [7, b"OK", None, [], [1], [1, "7", 0], [0, 5, 5, 0], [2, VALUE], [9, 1], [[1], 1, 0], [1, 7, 0, 5]],
    ids=repr,
)
def test_invalid_answer_is_not_a_lease(of: Any, answer: Any) -> None:
    store = of(dict.fromkeys(QUESTIONS, as_resp(answer)))
    with pytest.raises(LockUnavailable, match="not an answer to lock/acquire"):
        store.acquire(asked())


def test_valid_answer_is_a_lease(of: Any) -> None:
    assert isinstance(of({}).acquire(asked()), Lease)


def test_too_few_answers_renew_nothing(of: Any) -> None:
    holds = [Hold(KEY, new_owner(), ttl=30.0), Hold(KEY, new_owner(), ttl=30.0)]
    with pytest.raises(LockUnavailable, match="not an answer to lock/renew"):
        of({lock_commands.RENEW: as_resp([1])}).renew(holds, timeout=0.5)


def test_server_that_always_names_more_slots_is_not_asked_again(of: Any) -> None:
    """A stranger's `K:slots`, above all bounds, made each refusal ask forever."""
    store = of({lock_commands.REFUSE: as_resp([5, 10**9])})
    with pytest.raises(LockUnavailable, match="slots"):
        store.refuse(KEY, Holder("id"), RECORD)


@pytest.mark.parametrize("error", ["MOVED x", "ASK", "MOVED 5 nowhere"])
def test_redirection_without_an_address_is_an_error(of: Any, error: str) -> None:
    with pytest.raises(LockUnavailable):
        of(dict.fromkeys(QUESTIONS, as_resp(Exception(error)))).acquire(asked())


def test_user_without_the_right_to_pttl_gets_an_error(of: Any) -> None:
    store = of({b"GET": as_resp(VALUE), b"PTTL": as_resp(ResponseError("NOPERM no"))})
    for look in (lambda: store.inspect(KEY), lambda: store.held(KEY)):
        with pytest.raises(LockUnavailable, match="no"):
            look()


def test_surplus_answer_is_not_taken_for_the_next_one(of: Any) -> None:
    store = of({lock_commands.FREE: as_resp(1) + as_resp([1, 7, 0]), **dict.fromkeys(QUESTIONS, as_resp([4]))})
    assert store.free(Hold(KEY, new_owner(), ttl=30.0))
    with pytest.raises(LockUnavailable, match="given up"):
        store.acquire(asked())


def test_invalid_answer_is_named_with_its_script() -> None:
    call = Call(lock_commands.FREE, ["k"], [])
    assert call.understood(1) == 1
    error = ResponseError("no")
    assert call.understood(error) is error
    with pytest.raises(InvalidResponse, match=r"b'x' is not an answer to lock/free"):
        call.understood(b"x")
