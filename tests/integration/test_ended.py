"""What stays on a server of messages that have ended, and of locks that are free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from redis import Redis

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import FORGOTTEN, Held, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.bench import Bench, Sent
from tests.contract.store_contract.asking import ME, ask, taken
from tests.redis_server import RedisServer
from tests.servers import until

KEY = "ended:1:{job:1}"
SHARED = keyspace.shared(KEY)
ENDED, FENCE = keyspace.ended_keys(SHARED, b"")[0], keyspace.shared_fence_key(SHARED)

#: Bytes that each message takes there.
ENTRY = 12

RECORD = Record(ME.message, b"record", 60.0, content_for=0.001)


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    store = open_url(redis_server.url)
    assert isinstance(store, RedisStore)
    yield store
    store.close()
    redis_server.flush()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with redis_server.client() as client:
        yield client


def found(store: RedisStore, holder: Holder = ME) -> Lease | Held | Record:
    return ask(store, key=KEY, holder=holder, once=True)


def forget_contents(client: Redis) -> None:
    until(lambda: not [*client.scan_iter(f"{KEY}:done:*")], "their contents are forgotten")


def message(number: int, seconds: float = 60.0) -> Record:
    return Record(Holder(f"task {number}").message, b"record", seconds, content_for=0.001)


class TestEnds:
    def test_are_known_when_their_contents_are_forgotten(self, store: RedisStore, client: Redis) -> None:
        store.free(taken(store, key=KEY, holder=ME), record=RECORD)
        forget_contents(client)
        known = found(store)
        assert isinstance(known, Record)
        assert known.content == FORGOTTEN
        assert 50 < known.seconds <= 62
        assert store.refuse(KEY, ME, RECORD._replace(content=b"refused")) == known
        assert isinstance(found(store, Holder("other")), Lease)

    def test_are_known_whatever_bytes_their_names_have(self, store: RedisStore, client: Redis) -> None:
        """Among the digests of so many names are all characters that mean something in a pattern."""
        names = [Holder(f"task {number}") for number in range(300)]
        for name in names:
            store.remember(KEY, message(int(str(name.task_id).split()[1])))
        forget_contents(client)
        known = [found(store, name) for name in names]
        assert {it.content for it in known if isinstance(it, Record)} == {FORGOTTEN}
        assert len(known) == len([it for it in known if isinstance(it, Record)])

    def test_keep_their_contents_while_these_are_of_use(self, store: RedisStore) -> None:
        store.free(taken(store, key=KEY, holder=ME), record=RECORD._replace(content_for=30.0))
        known = found(store)
        assert isinstance(known, Record)
        assert known.content == b"record"
        assert 50 < known.seconds <= 62, "its age is the age of the message's end"

    def test_expire_one_by_one(self, store: RedisStore) -> None:
        store.free(taken(store, key=KEY, holder=ME), record=message(0, 3.0))
        store.free(taken(store, key=KEY, holder=ME), record=message(1, 60.0))
        assert isinstance(found(store, Holder("task 0")), Record)
        until(lambda: isinstance(found_and_freed(store, 0), Lease), "the first one is forgotten")
        assert isinstance(found(store, Holder("task 1")), Record)

    @pytest.mark.parametrize("seconds", [1.0, 600.0])
    def test_all_expire_with_the_last_one(self, store: RedisStore, client: Redis, seconds: float) -> None:
        for number, life in enumerate((60.0, seconds, 30.0)):
            store.free(taken(store, key=KEY, holder=ME), record=message(number, life))
        longest = max(60.0, seconds) * 1000
        assert longest < client.pttl(ENDED) <= longest + 3000

    def test_settled_record_counts_as_an_end(self, store: RedisStore, client: Redis) -> None:
        store.free(taken(store, key=KEY, holder=ME), record=RECORD._replace(content_for=None))
        assert client.exists(ENDED) == 0
        store.replace_records([(KEY, RECORD), (KEY, message(1))])
        assert client.strlen(ENDED) == ENTRY, "expired records stay gone"
        forget_contents(client)
        assert isinstance(found(store), Record)

    def test_refused_message_counts_as_an_end(self, store: RedisStore, client: Redis) -> None:
        assert store.refuse(KEY, ME, RECORD) is None
        forget_contents(client)
        assert isinstance(found(store), Record)

    def test_late_record_of_an_end_changes_nothing(self, store: RedisStore, client: Redis) -> None:
        """Otherwise it would say that perhaps none of the next tasks were sent."""
        lease, unsettled = taken(store, key=KEY, holder=ME), RECORD._replace(content_for=None)
        store.free(lease, record=unsettled)
        store.replace_records([(KEY, RECORD)])
        forget_contents(client)
        store._servers.run(lock_commands.free(lease, record=unsettled).again(repeated=True))
        known = found(store)
        assert isinstance(known, Record)
        assert known.content == FORGOTTEN

    def test_repeated_end_is_noted_once(self, store: RedisStore, client: Redis) -> None:
        lease = taken(store, key=KEY, holder=ME)
        for _ in range(3):
            store._servers.run(lock_commands.free(lease, record=RECORD).again(repeated=True))
        assert client.strlen(ENDED) == ENTRY

    def test_late_record_does_not_replace_a_newer_one(self, store: RedisStore, client: Redis) -> None:
        """Another worker, which has the message's end since then, may be sending the next tasks."""
        lease = taken(store, key=KEY, holder=ME)
        newer = RECORD._replace(content=b"newer", seconds=600.0, content_for=None)
        store.remember(KEY, newer)
        store._servers.run(lock_commands.free(lease, record=RECORD).again(repeated=True))
        known = found(store)
        assert isinstance(known, Record)
        assert known.content == b"newer"
        assert 590 < known.seconds <= 600, "its age is the age of the newer end"
        assert client.exists(ENDED) == 0

    @pytest.mark.parametrize("record", [RECORD, RECORD._replace(content_for=None)])
    def test_record_is_sent_again_if_there_was_no_room(self, store: RedisStore, client: Redis, record: Record) -> None:
        lease = taken(store, key=KEY, holder=ME)
        store.abandon(lease)
        client.config_set("maxmemory", 1)
        try:
            store.remember(KEY, record)
            with pytest.raises(LockUnavailable):
                store.free(lease, record=record)
        finally:
            client.config_set("maxmemory", 0)
        until(lambda: not store._pending, "it was repeated")
        assert isinstance(found(store), Record)

    def test_lock_is_not_reserved_for_a_message_that_has_ended(self, store: RedisStore, client: Redis) -> None:
        following = replace(ME, retries=1)
        over = RECORD._replace(message=following.message)
        store.free(taken(store, key=KEY, holder=following), record=over)
        forget_contents(client)
        store.free(taken(store, key=KEY, holder=ME), reservation=Reservation(following, 60.0))
        assert store.held(KEY) == []

    def test_match_within_another_name_does_not_count(self, store: RedisStore, client: Redis) -> None:
        name = keyspace.ended_name(KEY, ME.message)
        for text in (b"\xff" * 4 + name, b"\xff" * 8 + name + b"\xff" * 16, name + b"\xff\xff\xff"):
            client.set(ENDED, text)
            lease = found(store)
            assert isinstance(lease, Lease), text
            store.free(lease)
        client.set(ENDED, b"\xff" * 4 + name + name + b"\xff" * 4)
        assert isinstance(found(store), Record), "after a match that does not count"

    @pytest.mark.parametrize("places", [1, 2])
    def test_foreign_value_of_another_type_hides_no_end(self, store: RedisStore, client: Redis, places: int) -> None:
        for place in keyspace.ended_keys(SHARED, keyspace.ended_name(KEY, ME.message))[:places]:
            client.lpush(place, "x")
        assert store.free(taken(store, key=KEY, holder=ME), record=RECORD)
        if places == 1:
            forget_contents(client)
        known = found(store)
        assert isinstance(known, Record)
        assert known.content == (FORGOTTEN if places == 1 else b"record")
        assert known.seconds > 50

    @pytest.mark.parametrize("text", ["x", "x" * 11, "x" * 13, "x" * 24])
    def test_foreign_text_hides_no_end(self, store: RedisStore, client: Redis, text: str) -> None:
        client.set(ENDED, text)
        store.free(taken(store, key=KEY, holder=ME), record=RECORD)
        client.append(ENDED, "y")
        for number in range(30):
            store.free(taken(store, key=KEY, holder=ME), record=message(number))
        forget_contents(client)
        assert isinstance(found(store), Record)
        assert all(isinstance(found(store, Holder(f"task {number}")), Record) for number in range(30))
        assert client.strlen(ENDED) % ENTRY == 0


class TestWhatIsLeft:
    def test_by_messages_with_different_arguments(self, store: RedisStore, client: Redis) -> None:
        keys = [f"ended:1:{{job:{number}}}" for number in range(100)]
        for number, key in enumerate(keys):
            store.free(taken(store, key=key, holder=ME), record=message(number))
        shared = {keyspace.shared(key) for key in keys}
        expected = {f"{it}:{what}" for it in shared for what in ("ended", "fence")}
        until(lambda: {*client.scan_iter()} <= expected, "no key for each of them")
        assert sum(client.strlen(f"{it}:ended") for it in shared) == ENTRY * len(keys)

    def test_expired_ends_are_removed(self, store: RedisStore, client: Redis) -> None:
        """Also where other ends stay for long."""
        for number in range(100):
            store.free(taken(store, key=KEY, holder=ME), record=message(number, 600.0 if number % 10 == 0 else 0.001))
        assert client.strlen(ENDED) >= 10 * ENTRY
        until(lambda: isinstance(found_and_freed(store, 99), Lease), "the last one is forgotten")
        for number in range(100, 160):
            store.free(taken(store, key=KEY, holder=ME), record=message(number, 600.0))
        assert client.strlen(ENDED) == 70 * ENTRY
        assert all(isinstance(found(store, Holder(f"task {number}")), Record) for number in (*range(0, 100, 10), 159))

    def test_ends_that_do_not_fit_into_one_value_go_to_others(self, store: RedisStore, client: Redis) -> None:
        """A value is read as a whole."""
        numbers = range(5000)
        leave_many(store, numbers)
        lengths = {name: client.strlen(name) for name in client.scan_iter(f"{SHARED}:ended*")}
        assert sum(lengths.values()) == ENTRY * len(numbers)
        assert 100 < len(lengths) <= 257
        assert max(lengths.values()) == lengths[ENDED] < 25_000
        forget_contents(client)
        assert all(isinstance(found(store, Holder(f"task {number}")), Record) for number in numbers[::100])
        assert isinstance(found(store, Holder("task 5000")), Lease)

    def test_record_is_kept_as_it_is_when_all_values_are_full(self, store: RedisStore, client: Redis) -> None:
        full = b"\x7f" * 24_576
        name = keyspace.ended_name(KEY, ME.message)
        for each in keyspace.ended_keys(SHARED, name):
            client.set(each, full, ex=60)
        store.free(taken(store, key=KEY, holder=ME), record=RECORD)
        assert 50_000 < client.pttl(keyspace.done_key(KEY, ME.message)) <= 60_000
        assert client.strlen(ENDED) == len(full)

    def test_room_of_expired_ends_is_used_again(self, store: RedisStore, client: Redis) -> None:
        """Ends that may be forgotten first are in front, since they came first."""
        client.set(ENDED, b"\x7f" * 24_576, ex=60)
        over, known = bytes(12) * 1_024, b"\x7f" * 12 * 1_024
        for first in range(256):
            client.set(f"{SHARED}:ended:{first:02x}", over + known, ex=60)
        leave_many(store, range(5000))
        lengths = [client.strlen(f"{SHARED}:ended:{first:02x}") for first in range(256)]
        assert max(lengths) < 24_576

    def test_by_a_named_lock(self, store: RedisStore, client: Redis) -> None:
        store.free(taken(store, key=keyspace.PlainKey("nightly"), holder=ME))
        shared = keyspace.shared(keyspace.PlainKey("nightly"))
        assert [*client.scan_iter()] == [keyspace.shared_fence_key(shared)]


def leave_many(store: RedisStore, numbers: range) -> None:
    calls = [lock_commands.free(Hold.of_nobody(KEY), record=message(number)) for number in numbers]
    assert set(store._servers.run_each(calls)) == {0}


def found_and_freed(store: RedisStore, number: int) -> Lease | Held | Record:
    lease = found(store, Holder(f"task {number}"))
    if isinstance(lease, Lease):
        store.free(lease)
    return lease


def other_key() -> str:
    """A key that shares its values with `KEY`."""
    return next(key for number in range(10**6) if keyspace.shared(key := f"ended:1:{{other:{number}}}") == SHARED)


class TestFences:
    def test_grow_beyond_those_of_other_locks(self, store: RedisStore, client: Redis) -> None:
        """On a server whose clock was set back."""
        client.set(FENCE, 2**52)
        assert [taken(store, key=key).fence for key in (KEY, other_key())] == [2**52 + 1, 2**52 + 2]

    def test_are_kept_until_the_clock_has_caught_up(self, store: RedisStore, client: Redis) -> None:
        """The clock was set back by a day: an hour later, the time is still below the fences."""
        ahead = 24 * 3600
        seconds, microseconds = client.time()
        client.set(FENCE, (seconds + ahead) * 10**6 + microseconds)
        taken(store, key=KEY)
        assert ahead * 1000 < client.pttl(FENCE) <= (ahead + 3600) * 1000

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "x", str(2**63)])
    def test_foreign_value_is_replaced(self, store: RedisStore, client: Redis, value: str) -> None:
        client.set(FENCE, value)
        fences = [taken(store, key=key).fence for key in (KEY, other_key())]
        assert 10**15 < fences[0] < fences[1] < 2**53

    def test_of_a_lock_is_known_while_it_is_held(self, store: RedisStore) -> None:
        lease = taken(store, key=KEY)
        later = taken(store, key="ended:1:{job:2}")
        assert store.inspect(KEY).fence == lease.fence < later.fence
        store.free(lease)
        assert store.inspect(KEY).fence is None

    def test_hold_that_is_given_back_is_found_by_its_holder(self, store: RedisStore) -> None:
        """The call that undoes an acquire does not know its fence."""
        lease = taken(store, key=KEY, holder=ME)
        before, _ = ME.around_fence(lease.ttl).split("\n")
        value = f"{lease.owner}{before},"
        assert store._servers.run(lock_commands.undo(lease, value, [])) == 1
        assert store.held(KEY) == []


def test_result_of_an_earlier_task_with_this_id_is_not_that_of_a_retry(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first attempt is noted, so its content is kept for a minute only; but it has only just ended."""
    app = Celery("ended", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_backend = redis_server.url
    bench, copies = Bench(app, monkeypatch), list[Sent]()

    def body() -> None:
        bench.deliver(copy)
        copies.append(bench.put_back())
        task.retry(countdown=100)

    task = bench.task(body, on_conflict="join")
    first, copy = bench.send(task), bench.send(task)
    before = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat()
    bench.stored(first, {"status": "SUCCESS", "result": "old", "date_done": before})
    bench.deliver(first)
    assert bench.deliver(copies[0]) == "PENDING"
    redis_server.flush()
