"""Histories of floods with a known fault: the judge finds that fault, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from celery_singleton_lock.options.rules import SCOPES, UNTIL_EXECUTED, UNTIL_EXECUTING, UNTIL_EXPIRED, WHILE_EXECUTING
from tests.storm.flood.judge import Verdict, judge
from tests.storm.flood.rules import Rules

Lines = list[dict[str, Any]]

#: Seconds of a message's lock, of a lease, and within which a job has to be free again.
QUEUE_TTL, TTL, BOUND = 20.0, 2.0, 30.0

#: A process of a worker, and its process group.
CHILD, GROUP = 71, 70

WHEN_SENT = [scope for scope in SCOPES if scope != WHILE_EXECUTING]


def line(event: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"at": at, "event": event, "host": "", "pid": 1, **fields}


def sent(message: str, at: float, scope: str = UNTIL_EXECUTED, *, job: str = "j", told: str = "sent") -> Lines:
    """A call whose message the broker has a moment later; `told` is what its sender noted then."""
    lines = [
        line("sending", at, message=message, scope=scope, job=job),
        line("queued", at + 0.01, message=message),
    ]
    return [*lines, line(told, at + 0.02, message=message)] if told else lines


def duplicate(message: str, at: float, of: str, scope: str = UNTIL_EXECUTED, *, job: str = "j") -> Lines:
    call = line("sending", at, message=message, scope=scope, job=job)
    return [call, line("duplicate", at + 0.02, message=message, of=of)]


def runs(message: str, at: float, seconds: float = 1.0, *, pid: int = CHILD, steps: int = 4) -> Lines:
    """A delivery, with the steps that it made before it was killed."""
    about = {"message": message, "pid": pid, "group": GROUP}
    times = [("begun", at), ("start", at + 0.1), ("end", at + 0.1 + seconds), ("over", at + 0.2 + seconds)]
    return [line("taken", at - 0.01, message=message), *(line(name, when, **about) for name, when in times[:steps])]


def refused(message: str, at: float, *, pid: int = CHILD) -> Lines:
    about = {"message": message, "pid": pid, "group": GROUP}
    return [line("taken", at, message=message), *(line(name, at, **about) for name in ("begun", "refused", "over"))]


def killed(what: str, at: float, target: int = GROUP, since: float | None = None) -> dict[str, Any]:
    return line("killed", at, what=what, id=target, since=at if since is None else since)


def verdict(*parts: Lines | dict[str, Any], is_late: bool = False, queue_ttl: float | None = QUEUE_TTL) -> Verdict:
    lines = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    rules = Rules(queue_ttl, QUEUE_TTL, TTL, is_late)
    return judge(rules, BOUND, sorted(lines, key=lambda one: one["at"]))


def found(made: Verdict) -> list[str]:
    return [one.broken for one in made.broken]


@pytest.mark.parametrize("scope", SCOPES)
def test_consecutive_messages_are_fine(scope: str) -> None:
    later = QUEUE_TTL + 1 if scope == UNTIL_EXPIRED else 3.0
    made = verdict(sent("a", 1, scope), runs("a", 1.1), sent("b", later, scope), runs("b", later + 0.1))
    assert made.findings == []
    assert (made.counts[scope].sent, made.counts[scope].runs) == (2, 2)


class TestSentTwice:
    @pytest.mark.parametrize("scope", WHEN_SENT)
    def test_two_waiting_messages(self, scope: str) -> None:
        lines = sent("a", 1, scope), sent("b", 2, scope), runs("a", 3), runs("b", 6)
        assert found(verdict(*lines)) == ["sent twice"]

    def test_each_waiting_message_counts(self) -> None:
        calls = [sent(name, 1 + place / 10, UNTIL_EXECUTING) for place, name in enumerate("abcd")]
        bodies = [runs(name, 3 + place, 0.5) for place, name in enumerate("abcd")]
        assert found(verdict(*calls, *bodies)) == ["sent twice"] * 3

    @pytest.mark.parametrize(
        ("scope", "wrong"), [(UNTIL_EXECUTED, True), (UNTIL_EXPIRED, True), (UNTIL_EXECUTING, False)]
    )
    def test_beside_a_running_message(self, scope: str, wrong: bool) -> None:
        lines = sent("a", 1, scope), runs("a", 1.5, 5), sent("b", 3, scope), runs("b", 8)
        assert found(verdict(*lines)) == ["sent twice"] * wrong

    def test_other_jobs_and_other_scopes_do_not_count(self) -> None:
        calls = sent("a", 1), sent("b", 1, job="k"), sent("c", 1, UNTIL_EXECUTING)
        assert found(verdict(*calls, *(runs(name, 2 + place, 0.5) for place, name in enumerate("abc")))) == []

    def test_after_an_unconfirmed_lock_has_expired(self) -> None:
        lines = sent("a", 1), sent("b", 1 + QUEUE_TTL), runs("a", 40), runs("b", 45)
        assert found(verdict(*lines)) == []
        assert found(verdict(*lines, queue_ttl=None)) == ["sent twice"]

    def test_message_whose_sender_was_killed_before_it_noted_the_send(self) -> None:
        lines = sent("a", 1, told=""), killed("sender", 1.1, 1), sent("b", 1.2), runs("a", 1.15, 3), runs("b", 6)
        assert found(verdict(*lines)) == ["sent twice"]

    def test_message_whose_sender_got_an_error_has_no_lock(self) -> None:
        assert found(verdict(sent("a", 1, told="unsure"), sent("b", 2), runs("a", 3), runs("b", 6))) == []

    @pytest.mark.parametrize(("is_late", "wrong"), [(True, ["sent twice"]), (False, [])])
    def test_message_whose_worker_was_killed_while_it_ran(self, is_late: bool, wrong: list[str]) -> None:
        """The message comes again and keeps the lock, or it is lost with its worker, and so is the lock."""
        died = [*runs("a", 1.5, steps=2), killed("worker", 2.0)]
        again = [line("queued", 6, message="a"), *runs("a", 6.5)] if is_late else []
        lines = sent("a", 1), died, sent("b", 5), again, runs("b", 9)
        assert found(verdict(*lines, is_late=is_late)) == wrong


class TestOverlap:
    @pytest.mark.parametrize("scope", SCOPES)
    def test_two_runs_of_a_job(self, scope: str) -> None:
        """The lock of the first has expired by then, so that a second could be sent."""
        calls = sent("a", 1, scope), sent("b", 2 + QUEUE_TTL, scope)
        made = verdict(*calls, runs("a", 3 + QUEUE_TTL, 5), runs("b", 4 + QUEUE_TTL, 5, pid=72))
        assert found(made) == ["overlap"] * (scope not in (UNTIL_EXECUTING, UNTIL_EXPIRED))

    def test_two_runs_of_one_message_under_any_scope(self) -> None:
        lines = sent("a", 1, UNTIL_EXECUTING), runs("a", 1.1, 5), runs("a", 2, 5, pid=72)
        assert "overlap" in found(verdict(*lines))

    def test_after_a_run_that_was_killed(self) -> None:
        died = [*runs("a", 1.1, steps=2), killed("child", 2.0, CHILD)]
        assert found(verdict(sent("a", 1), died, runs("a", 2.5, pid=72), is_late=True)) == []
        assert found(verdict(sent("a", 1), died, runs("a", 1.5, pid=72), is_late=True)) == ["overlap"]

    def test_after_a_run_that_is_not_known_to_have_ended(self) -> None:
        lines = sent("a", 1), runs("a", 1.1, steps=2), killed("worker", 2.0, 99), runs("a", 2.5, pid=72)
        assert "overlap" in found(verdict(*lines))


class TestAgain:
    def test_after_its_end(self) -> None:
        assert found(verdict(sent("a", 1), runs("a", 1.1), runs("a", 4))) == ["again"]

    def test_process_that_was_killed_before_it_could_record_the_end(self) -> None:
        lines = sent("a", 1), runs("a", 1.1, steps=3), killed("worker", 2.25), runs("a", 8, pid=72)
        made = verdict(*lines, is_late=True)
        assert made.broken == []
        assert made.number_of(UNTIL_EXECUTED, "again", excused=True) == 1

    def test_process_that_went_on_for_a_moment_as_it_was_killed(self) -> None:
        died = [*runs("a", 1.1, steps=3), killed("worker", 2.25, since=1.05)]
        made = verdict(sent("a", 1), died, runs("a", 8, pid=72), is_late=True)
        assert made.broken == []
        assert made.number_of(UNTIL_EXECUTED, "again", excused=True) == 1
        assert "overlap" in found(verdict(sent("a", 1), died, runs("a", 1.5, pid=72), is_late=True))


class TestRefused:
    def test_while_another_message_may_have_the_lock(self) -> None:
        assert found(verdict(sent("a", 1), duplicate("b", 1.5, "a"), runs("a", 2), duplicate("c", 2.5, "a"))) == []

    @pytest.mark.parametrize("scope", [UNTIL_EXECUTED, UNTIL_EXECUTING])
    def test_when_sent_though_the_lock_is_free(self, scope: str) -> None:
        assert found(verdict(sent("a", 1, scope), runs("a", 2), duplicate("b", 5, "a", scope))) == ["refused"]

    def test_behind_a_running_message_where_only_waiting_is_exclusive(self) -> None:
        lines = sent("a", 1, UNTIL_EXECUTING), runs("a", 2, 5), duplicate("b", 4, "a", UNTIL_EXECUTING)
        assert found(verdict(*lines)) == ["refused"]

    def test_after_its_time(self) -> None:
        lines = sent("a", 1, UNTIL_EXPIRED), runs("a", 2), duplicate("b", 2 + QUEUE_TTL, "a", UNTIL_EXPIRED)
        assert found(verdict(*lines)) == ["refused"]

    @pytest.mark.parametrize("scope", [UNTIL_EXPIRED, UNTIL_EXECUTED])
    def test_for_a_message_whose_sender_was_killed_right_after_it_took_the_lock(self, scope: str) -> None:
        call = line("sending", 1, message="a", scope=scope, job="j")
        lines = call, killed("sender", 5, 1), duplicate("b", 4 + QUEUE_TTL, "a", scope)
        assert found(verdict(*lines)) == []
        assert found(verdict(*lines, duplicate("c", 7 + QUEUE_TTL, "a", scope))) == ["refused"]

    @pytest.mark.parametrize("of", ["nobody", "other"])
    def test_for_a_message_that_cannot_have_the_lock(self, of: str) -> None:
        lines = sent("other", 1, job="k"), duplicate("b", 1.5, of), runs("other", 2)
        assert found(verdict(*lines)) == ["refused"]

    def test_for_a_lost_message(self) -> None:
        lines = sent("a", 1), killed("worker", 1.5), duplicate("b", 10, "a")
        assert found(verdict(*lines, is_late=True)) == []
        assert found(verdict(*lines, duplicate("c", 60, "a"), is_late=True)) == ["refused"]

    @pytest.mark.parametrize(("at", "wrong"), [(2.5, []), (6.0, ["refused"])])
    def test_when_its_run_was_to_start(self, at: float, wrong: list[str]) -> None:
        calls = sent("a", 1, WHILE_EXECUTING), sent("b", 1, WHILE_EXECUTING)
        made = verdict(*calls, runs("a", 2), refused("b", at, pid=72))
        assert found(made) == wrong
        assert (made.counts[WHILE_EXECUTING].runs, made.counts[WHILE_EXECUTING].refused) == (1, 1)

    @pytest.mark.parametrize(("at", "wrong"), [(4.0, []), (8.0, ["refused"])])
    def test_for_a_killed_run(self, at: float, wrong: list[str]) -> None:
        calls = sent("a", 1, WHILE_EXECUTING), sent("b", 1, WHILE_EXECUTING)
        died = [*runs("a", 2, steps=2), killed("worker", 3.0), line("queued", 9, message="a"), *runs("a", 9.1)]
        assert found(verdict(*calls, died, refused("b", at, pid=72), is_late=True)) == wrong

    def test_for_a_message_that_was_refused_itself(self) -> None:
        calls = sent("a", 1, WHILE_EXECUTING), sent("b", 1, WHILE_EXECUTING)
        assert found(verdict(*calls, refused("a", 2), refused("b", 2, pid=72))) == ["refused"] * 2


class TestLost:
    def test_message_that_nobody_has_run(self) -> None:
        assert found(verdict(sent("a", 1))) == ["lost"]

    def test_message_that_was_queued_before_its_sender_was_killed(self) -> None:
        assert found(verdict(sent("a", 1, told=""), killed("sender", 1.02, 1))) == ["lost"]

    def test_message_that_was_not_sent(self) -> None:
        call = line("sending", 1, message="a", scope=UNTIL_EXECUTED, job="j")
        made = verdict(call, killed("sender", 1.01, 1))
        assert made.findings == []
        assert made.counts[UNTIL_EXECUTED].unsure == 1

    def test_between_the_queue_and_a_killed_worker(self) -> None:
        made = verdict(sent("a", 1), killed("worker", 2), is_late=True)
        assert (made.broken, made.number_of(UNTIL_EXECUTED, "lost", excused=True)) == ([], 1)

    @pytest.mark.parametrize(("is_late", "wrong"), [(True, ["lost"]), (False, [])])
    def test_with_a_worker_that_had_it(self, is_late: bool, wrong: list[str]) -> None:
        lines = sent("a", 1), runs("a", 1.5, steps=2), killed("worker", 2)
        assert found(verdict(*lines, is_late=is_late)) == wrong

    @pytest.mark.parametrize(
        ("at", "is_told", "wrong"), [(2.5, True, []), (6.0, True, ["refused"]), (2.5, False, ["lost"])]
    )
    def test_with_a_child_that_was_killed_before_it_reported_its_refusal(
        self, at: float, is_told: bool, wrong: list[str]
    ) -> None:
        calls = sent("a", 1, WHILE_EXECUTING), sent("b", 1, WHILE_EXECUTING)
        dies = [*runs("b", at, pid=72, steps=1), killed("child", at + 0.01, 72)]
        told = [line("revoked", 9, message="b")] if is_told else []
        assert found(verdict(*calls, runs("a", 2), dies, told, is_late=True)) == wrong

    def test_after_the_last_worker_was_killed(self) -> None:
        assert found(verdict(killed("worker", 0.5), sent("a", 1), is_late=True)) == ["lost"]


class TestStuck:
    @pytest.mark.parametrize(("at", "wrong"), [(15.0, []), (10 + BOUND + 1, ["stuck"]), (None, ["stuck"])])
    def test_a_job_that_is_not_free_in_time(self, at: float | None, wrong: list[str]) -> None:
        free = [] if at is None else [line("free_again", at, scope=UNTIL_EXECUTED, job="j")]
        made = verdict(sent("a", 1), runs("a", 1.1), line("calm_begins", 10), free)
        assert found(made) == wrong
        assert made.counts[UNTIL_EXECUTED].freed == (None if at is None else at - 10)


class TestQueue:
    @pytest.mark.parametrize(("length", "wrong"), [(1, []), (2, ["queue"]), (0, ["queue"])])
    def test_length_is_what_was_sent(self, length: int, wrong: list[str]) -> None:
        asked = line("length", 2, scope=UNTIL_EXECUTED, length=length)
        made = verdict(sent("a", 1), duplicate("b", 1.5, "a"), asked, runs("a", 3))
        assert found(made) == wrong
        assert made.counts[UNTIL_EXECUTED].queued == length
