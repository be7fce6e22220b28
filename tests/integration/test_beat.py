"""Several beats at once: real beats, real servers, real kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_singleton_lock import clock
from tests.integration.beats import Beat, Studio, gaps, studio, twice
from tests.integration.conftest import until
from tests.recording import Record
from tests.redis_server import RedisServer

#: Seconds of a claim in these tests.
TTL = 2.0

#: Seconds between two ticks where none may be missing: a beat that is stopped for longer leaves one out, as Celery's.
EVERY = 1.5

#: The entry with these ticks, unless a test has other entries.
TICK = "tick"

#: A schedule for tests that count ticks only.
OFTEN = {"half": 0.5}


@pytest.fixture
def beats(own_redis: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Studio]:
    with studio(own_redis, own_redis, tmp_path) as made:
        made.schedule = {TICK: EVERY}
        yield made
        if request.session.testsfailed:
            for beat in made.beats:
                print(f"---- {beat.name}\n{beat.log[-3000:]}")


def check(studio: Studio, *, missing: int = 0, entry: str = TICK, every: float = EVERY) -> None:
    """Check that no tick was sent twice, and that at most this many gaps have missing ticks."""
    sent = studio.sent(entry)
    assert twice(sent) == []
    assert len(gaps(sent, every)) <= missing, (gaps(sent, every), [message.due for message in sent])


def test_beats_share_the_ticks_and_go_on_without_one_that_stops(beats: Studio) -> None:
    beats.conf["singleton_lock_beat_ttl"] = 60.0
    first, second = beats.start("first", "second")
    beats.wait_for_sent(3)
    until(lambda: beats.seen() == [first.process.pid, second.process.pid])
    assert first.terminate() == 0
    assert beats.seen() == [second.process.pid]
    beats.wait_for_sent(3)
    assert second.terminate() == 0
    assert beats.seen() == []
    check(beats)


@pytest.mark.parametrize("end", [Beat.kill, Beat.pause], ids=["killed", "stopped"])
def test_beat_that_dies_between_ticks_leaves_no_gap(beats: Studio, end: Callable[[Beat], None]) -> None:
    beats.schedule = OFTEN
    beats.conf["singleton_lock_beat_ttl"] = 600.0
    first, _ = beats.start("first", "second")
    first.wait_for("Sending due")
    beats.wait_for_sent(2)
    beats.pause_between_ticks(first)
    if end is Beat.kill:
        first.kill()
    beats.wait_for_sent(4)
    check(beats, entry="half", every=0.5)
    if end is Beat.pause:
        first.resume()
        beats.wait_for_sent(4)
        check(beats, entry="half", every=0.5)


def test_lock_server_that_goes_away(own_redis: RedisServer, tmp_path: Path) -> None:
    """Nothing is sent without it; afterwards beat goes on by itself."""
    with RedisServer() as locks, studio(own_redis, locks, tmp_path) as beats:
        first, second = beats.start("first", "second")
        beats.wait_for_sent(2)
        locks.kill()
        for beat in (first, second):
            beat.wait_for("sends nothing until the lock server answers", "the lock server does not answer this beat")
        before = len(beats.sent())
        last = beats.sent()[-1].task_id
        clock.sleep(2 * TTL)
        assert len(beats.sent()) <= before + 1
        locks.start()  # It has lost everything.
        beats.wait_for_sent(4)
        assert [first.process.poll(), second.process.poll()] == [None, None]
        assert {*twice(beats.sent())} <= {last}, "the other beat may not have passed over this tick yet"


def test_tick_that_the_broker_does_not_take_is_sent_when_it_does(tmp_path: Path, own_redis: RedisServer) -> None:
    """Celery's own scheduler would lose it."""
    with RedisServer(["--appendonly", "yes"]) as broker, studio(broker, own_redis, tmp_path) as beats:
        beats.conf["task_publish_retry"] = False
        beats.schedule = {"one": 1.0, "other": 1.0}
        (only,) = beats.start("only")
        beats.wait_for_sent(2, "one")
        broker.kill()
        only.wait_for("trying again, under the same id")
        broker.start()
        beats.wait_for_sent(3, "one")
        beats.wait_for_sent(3, "other")
        for entry in beats.schedule:
            assert twice(beats.sent(entry)) == []
        assert only.process.poll() is None


def test_changed_schedule_is_honoured(beats: Studio) -> None:
    beats.schedule = {"kept": 0.5, "changed": 3600.0, "removed": 0.5}
    (first,) = beats.start("first")
    beats.wait_for_sent(2, "removed")
    first.terminate()
    beats.schedule = {"kept": 0.5, "changed": 0.5, "new": 0.5}
    beats.start("second")
    removed = len(beats.sent("removed"))
    for entry in beats.schedule:
        beats.wait_for_sent(3, entry)
        assert twice(beats.sent(entry)) == []
    assert len(beats.sent("removed")) == removed
    assert {*beats.ledger()} >= {"changed", "kept", "new"}


def test_beat_embedded_in_workers(beats: Studio) -> None:
    beats.schedule = OFTEN
    beats.conf["singleton_lock_beat_ttl"] = 60.0
    workers = []
    for name in ("one", "two"):
        schedule = str(beats.directory / f"{name}.schedule")
        command = ("worker", "-B", "--scheduler", "exclusive", "-s", schedule, "-n", f"{name}@test", "-c", "1")
        workers += beats.start(name, command=(*command, "--without-mingle", "--without-gossip"))
    first, _ = workers
    record = Record(beats.directory / "record")
    record.wait_for(ends=3)
    first.terminate()
    seen = len(record.runs())
    runs = record.wait_for(ends=seen + 4)
    assert len({run.task_id for run in runs}) == len(runs)


def test_user_with_the_documented_rights_is_enough(own_redis: RedisServer, beats: Studio) -> None:
    with own_redis.client(0) as client:
        rights = ("~singleton_lock:*", "+@read", "+@write", "+@scripting", "+time", "+select")
        client.execute_command("ACL", "SETUSER", "locks", "on", ">secret", *rights)
    address = own_redis.url_of(2).rpartition("@")[2].removeprefix("redis://")
    beats.conf["singleton_lock_backend"] = f"redis://locks:secret@{address}"
    first, _ = beats.start("first", "second")
    beats.wait_for_sent(2)
    first.terminate()
    beats.wait_for_sent(2)
    check(beats)
