"""What happens to a refused copy, and to those that wait for it. Nobody waits forever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import LockConflict, clock
from tests.integration.conftest import LONG, Shop, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps

#: Seconds of the holders' leases. No test here waits for the end of a lease, and a process that a busy machine stops
#: for a second must not consider its own lease lost.
TTL = 60.0


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=TTL) as shop:
        yield shop


@pytest.fixture
def holder(shop: Shop) -> Iterator[AsyncResult]:
    """A task on one of two workers that holds the lock of "report"."""
    # One slot stays free beside this holder and another one in the test: a full worker would keep a copy back.
    shop.start("one", "two", concurrency=3)
    result = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    yield result
    shop.record.let_end("report")
    assert result.get(timeout=LIMIT) == "report", "the holder's own result was disturbed"
    assert overlaps(shop.record.runs("report")) == []


def copy_of(shop: Shop, policy: str) -> object:
    return shop.send("exclusive", "report", singleton_lock={"on_conflict": policy})


def end_once_refused(shop: Shop, copies: int) -> None:
    """Let the holder end after that many copies were put back."""
    until(lambda: len(shop.refused("retry")) >= copies)
    shop.record.let_end("report")


def signed(shop: Shop, policy: str) -> object:
    return shop.sign("exclusive", "report", headers={"singleton_lock": {"on_conflict": policy}}, immutable=True)


def states(result: AsyncResult) -> list[str]:
    """The final states of a chain's steps, last step first; they are recorded one after the other."""
    found = []
    while result is not None:
        alone = AsyncResult(result.id, app=result.app)
        until(lambda alone=alone: alone.ready())
        found.append(alone.state)
        result = result.parent
    return found


class TestCaller:
    def test_skip(self, shop: Shop, holder: AsyncResult) -> None:
        copy = copy_of(shop, "skip")
        with pytest.raises(TaskRevokedError, match=f"held by task {holder.id}"):
            copy.get(timeout=LIMIT)
        assert copy.state == "REVOKED"
        assert not copy.successful()
        assert "Traceback" not in shop.workers[0].log + shop.workers[1].log

    def test_raise(self, shop: Shop, holder: AsyncResult) -> None:
        copy = copy_of(shop, "raise")
        with pytest.raises(LockConflict) as caught:
            copy.get(timeout=LIMIT)
        assert caught.value.task_id == holder.id
        assert 0 < caught.value.remaining <= TTL
        assert copy.state == "FAILURE"
        until(lambda: f"[{copy.id}] raised expected: LockConflict" in shop.log)
        assert "Traceback" not in shop.log

    def test_retry(self, shop: Shop, holder: AsyncResult) -> None:
        copies = [copy_of(shop, "retry") for _ in range(3)]
        end_once_refused(shop, 3)
        assert [copy.get(timeout=LIMIT) for copy in copies] == ["report"] * 3
        assert len(shop.record.runs("report")) == 4

    @pytest.mark.parametrize("policy", ["skip", "raise", "reject"])
    def test_copy_with_the_id_of_the_holder_leaves_its_result_alone(
        self, shop: Shop, holder: AsyncResult, policy: str
    ) -> None:
        headers = {"singleton_lock": {"id": holder.id, "sent": "f" * 32, "call": {"on_conflict": policy}}}
        shop.send("exclusive", "report", task_id=holder.id, headers=headers)
        until(lambda: shop.refused(policy) == {holder.id})
        for _ in range(10):  # Anything that the main process stores comes soon after that.
            assert holder.state in ("PENDING", "STARTED")
            clock.sleep(0.1)


class TestChain:
    @pytest.mark.parametrize("policy", ["skip", "raise", "reject"])
    def test_refused_head_ends_the_whole_chain(self, shop: Shop, holder: AsyncResult, policy: str) -> None:
        result = chain(signed(shop, policy), shop.sign("echo"), shop.sign("mark"), app=shop.app)()
        with pytest.raises(Exception, match="held by task"):
            result.get(timeout=LIMIT)
        final = "REVOKED" if policy == "skip" else "FAILURE"
        assert states(result) == [final] * 3
        assert shop.record.runs("mark") == []

    def test_chain_of_the_same_call(self, shop: Shop) -> None:
        """Each step finds the lock free: the lock is freed before the next step is sent."""
        for _ in range(10):
            step = shop.sign("exclusive", "report", 0.0, immutable=True)
            assert chain(step, step, step, app=shop.app)().get(timeout=LIMIT) == "report"
        assert len(shop.record.runs("report")) == 30


class TestChord:
    @pytest.mark.parametrize("policy", ["skip", "raise", "reject"])
    def test_refused_header_task_fails_the_chord(self, shop: Shop, holder: AsyncResult, policy: str) -> None:
        header = group([shop.sign("echo", 1), signed(shop, policy), shop.sign("echo", 2)], app=shop.app)
        result = chord(header, shop.sign("mark"), app=shop.app)()
        body = AsyncResult(result.id, app=shop.app)
        with pytest.raises(Exception, match=r"held by task|Dependency"):
            body.get(timeout=LIMIT)
        assert body.state == "FAILURE"
        assert {member.state for member in result.parent.results} <= {"SUCCESS", "FAILURE", "REVOKED"}
        assert shop.record.runs("mark") == []

    def test_retried_header_task_completes_the_chord(self, shop: Shop, holder: AsyncResult) -> None:
        header = group([shop.sign("echo", 1), signed(shop, "retry"), signed(shop, "retry")], app=shop.app)
        result = chord(header, shop.sign("mark"), app=shop.app)()
        end_once_refused(shop, 2)
        assert result.get(timeout=LIMIT) == "marked"
        assert len(shop.record.runs("mark")) == 1


class TestAtLeastFor:
    """The lock outlives a quick task: a call that was sent twice runs once."""

    def test_second_copy_is_refused_though_the_first_has_ended(self, shop: Shop) -> None:
        shop.start("one", "two")
        sent_at = clock.now()
        first = shop.send("exclusive", "report", 0.01, singleton_lock={"at_least_for": 8.0})
        assert first.get(timeout=LIMIT) == "report"
        second = shop.send("exclusive", "report", 0.01)
        with pytest.raises(TaskRevokedError, match=f"held by task {first.id}"):
            second.get(timeout=LIMIT)
        (key,) = shop.held()
        with shop.locks() as client:
            assert 0 < client.pttl(key) <= 8000
        third = shop.send("exclusive", "report", 0.01, singleton_lock={"wait": LIMIT})
        assert third.get(timeout=LIMIT) == "report"
        runs = shop.record.runs("report")
        assert runs[1].start - sent_at >= 8.0, "counted from when the lock was taken, which is before the first start"
        assert overlaps(runs) == []
