"""Histories with known faults: the checker finds each fault, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.storm.checker import Checker, Verdict
from tests.storm.excuses import (
    FORGOT,
    FROZEN,
    FROZEN_AT_THE_END,
    HOGGED,
    KILLED,
    KILLED_RETRYING,
    LOST_BY_BROKER,
    REJECTED,
    SILENT,
    UNREPEATED,
    UNSENT,
    UNTOLD,
)

TTL = 4.0

#: A message that was put back; whoever took it off the list did not live to note that.
QUEUED_AGAIN = (1, "taken"), (2, "queued")

Lines = list[dict[str, Any]]


def body(
    message: str,
    start: float,
    end: float,
    *,
    key: str = "k",
    pid: int = 1,
    fence: int = 0,
    how: str = "done",
    every: float = 0.1,
    told: str = "",
    **fields: Any,
) -> Lines:
    """A body that writes all the time; `how=""` if it was killed; `told` is the state stored as its end."""
    run, about = f"{message}-{pid}-{start}", {"host": "east", "pid": pid}
    begun = {"at": start, "event": "start", "run": run, "key": key, "message": message, "fence": fence, **fields}
    beats = [start + number * every for number in range(1, int((end - start) / every))]
    lines = [{**begun, **about}, *({"at": at, "event": "beat", "run": run, **about} for at in beats)]
    if how:
        lines.append({"at": end, "event": "end", "run": run, "how": how, **about})
    if told:
        lines.append(end_of(message, end + 0.01, told, pid=pid))
    return lines


def end_of(message: str, at: float, state: str, *, error: str = "", pid: int = 1) -> dict[str, Any]:
    return {"at": at, "event": "told", "message": message, "state": state, "error": error, "pid": pid, "host": "east"}


def sent(message: str, *, at: float = 0.0, after: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"at": at, "event": "sent", "message": message, "task": "work", "key": "k", "after": list(after)}


def fault(kind: str, begin: float, end: float, **fields: Any) -> dict[str, Any]:
    return {"event": "fault", "kind": kind, "begin": begin, "at": end, **fields}


def judge(*lines: Any, quorum: int = 1, servers: int = 1) -> Verdict:
    flat: Lines = []
    for one in lines:
        flat += one if isinstance(one, list) else [one]
    return Checker(TTL, quorum=quorum, servers=servers).judge(flat)


def found(verdict: Verdict) -> list[tuple[str, str]]:
    return [(finding.broken, finding.excuse) for finding in verdict.findings]


def test_consecutive_bodies_are_fine() -> None:
    lines = body("a", 1, 3, fence=1, told="SUCCESS"), body("b", 3, 4, fence=2, told="SUCCESS")
    verdict = judge(sent("a"), sent("b"), *lines)
    assert found(verdict) == []
    assert (verdict.messages, verdict.bodies) == (2, 2)


def test_two_bodies_of_one_key_at_once() -> None:
    assert found(judge(body("a", 1, 3), body("b", 2, 4))) == [("overlap", "")]


def test_bodies_of_two_keys_may_overlap() -> None:
    assert found(judge(body("a", 1, 3), body("b", 2, 4, key="other"))) == []


def test_long_run_overlaps_with_several_others() -> None:
    assert found(judge(body("a", 1, 9), body("b", 2, 3), body("c", 8, 8.5))) == [("overlap", "")] * 2


def test_a_body_that_was_killed_ends_with_its_last_line() -> None:
    assert found(judge(body("a", 1, 3, how=""), body("b", 3, 4))) == []


@pytest.mark.parametrize(("bodies", "wrong"), [(2, 0), (3, 1)])
def test_no_more_bodies_than_the_limit(bodies: int, wrong: int) -> None:
    lines = [body(f"m{number}", 1 + number / 10, 3, limit=2) for number in range(bodies)]
    assert found(judge(*lines)) == [("overlap", "")] * wrong


def test_a_frozen_process_dies_of_a_signal_when_it_resumes() -> None:
    frozen = fault("worker: frozen", 1.2, 2, pids=[1], fate="frozen")
    killed = fault("child: SIGSEGV", 1.5, 1.5, pids=[1], fate="killed")
    assert found(judge(body("a", 1, 2.2), frozen, killed, body("a", 9, 10, pid=2))) == [("again", "")]
    assert found(judge(body("a", 1, 2.01), frozen, killed, body("a", 9, 10, pid=2))) == [("again", KILLED)]


class TestAnEndOnABareMajority:
    """Two of five nodes are away when it is written, its process is killed, and one of the other nodes forgets it."""

    @staticmethod
    def lines(*faults: dict[str, Any], gone: float = 2.1) -> list[Any]:
        killed = fault("worker: SIGKILL", gone, 2.5, pids=[1], fate="killed")
        return [body("a", 1, 2, told="SUCCESS"), killed, *faults, body("a", 9, 10, pid=2)]

    def away(self, node: int, until: float = 4.0, host: str = "*") -> dict[str, Any]:
        return fault("lock server: stalled", 1.5, until, silent=[f"{host}/{node}"])

    def forgets(self, node: int, at: float = 6.0) -> dict[str, Any]:
        return fault("lock server: dies, and returns empty", at, at + 1, forgot=str(node), silent=[f"*/{node}"])

    def test_is_an_exception(self) -> None:
        assert self.judged(self.away(0), self.away(1, host="east"), self.forgets(2)) == [("again", UNREPEATED)]

    def test_unless_none_forgot(self) -> None:
        assert self.judged(self.away(0), self.away(1)) == [("again", "")]

    def test_unless_a_majority_is_left(self) -> None:
        assert self.judged(self.away(0), self.forgets(2)) == [("again", "")]

    def test_unless_it_is_the_same_node(self) -> None:
        assert self.judged(self.away(0), self.away(1), self.forgets(1)) == [("again", "")]

    def test_unless_it_was_back_before_the_process_was_killed(self) -> None:
        assert self.judged(self.away(0), self.away(1, until=2.05), self.forgets(2)) == [("again", "")]

    def test_unless_it_was_away_from_another_host(self) -> None:
        assert self.judged(self.away(0), self.away(1, host="west"), self.forgets(2)) == [("again", "")]

    def test_unless_the_process_lived_on(self) -> None:
        assert self.judged(self.away(0), self.away(1), self.forgets(2), gone=5.0) == [("again", "")]

    def judged(self, *faults: dict[str, Any], gone: float = 2.1) -> list[tuple[str, str]]:
        return found(judge(*self.lines(*faults, gone=gone), quorum=3, servers=5))


class TestABodyThatStoodStill:
    """It was frozen from 3 to 9, while the other body began."""

    frozen = fault("worker: frozen", 3, 9, pids=[1, 2], fate="frozen")

    @staticmethod
    def still(end: float = 9.5) -> Lines:
        lines = [{**line, "run": "one"} for line in [*body("a", 1, 3, how=""), *body("a", 9, end)]]
        return [line if line["at"] != 9 else {**line, "event": "beat"} for line in lines]

    def test_with_its_whole_worker_is_an_exception(self) -> None:
        assert found(judge(self.still(), self.frozen, body("b", 8, 12))) == [("overlap", FROZEN)]

    def test_without_a_reason_there_is_no_exception(self) -> None:
        assert found(judge(self.still(), body("b", 8, 12))) == [("overlap", "")]

    def test_another_frozen_worker_is_not_an_excuse(self) -> None:
        other = fault("worker: frozen", 3, 9, pids=[2], fate="frozen")
        assert found(judge(self.still(), other, body("b", 8, 12))) == [("overlap", "")]

    def test_alone_keeps_its_lock(self) -> None:
        alone = fault("child: stopped", 3, 9, pids=[1], fate="stopped")
        assert found(judge(self.still(), alone, body("b", 8, 12))) == [("overlap", "")]

    def test_alone_is_an_exception_where_its_main_process_cannot_renew(self) -> None:
        alone, silence = fault("child: stopped", 3, 9, pids=[1], fate="stopped"), fault("cut", 4, 8, silent=["east/0"])
        assert found(judge(self.still(), alone, silence, body("b", 8, 12))) == [("overlap", FROZEN)]

    def test_while_c_code_held_its_process_is_an_exception(self) -> None:
        assert found(judge(self.still(), body("c", 3, 9, key="hog-1"), body("b", 8, 12))) == [("overlap", HOGGED)]

    def test_going_on_afterwards_is_not_an_excuse(self) -> None:
        assert found(judge(self.still(14), self.frozen, body("b", 8, 9.5))) == [("overlap", "")]

    def test_long_before_is_not_an_excuse(self) -> None:
        assert found(judge(self.still(14), self.frozen, body("b", 12, 13))) == [("overlap", "")]


def test_a_gap_of_the_usual_length_is_not_an_excuse() -> None:
    frozen = fault("worker: frozen", 2, 2.4, pids=[1], fate="frozen")
    assert found(judge(body("a", 1, 3, every=0.5), frozen, body("b", 2.2, 4))) == [("overlap", "")]


class TestALockServerThatForgot:
    empty = fault("restarts empty", 2, 2.1, forgot="7000")

    def test_excuses_until_the_next_renewal(self) -> None:
        assert found(judge(body("a", 1, 4), self.empty, body("b", 3, 5))) == [("overlap", FORGOT)]

    def test_excuses_no_run_that_goes_on_after_the_next_renewal(self) -> None:
        assert found(judge(body("a", 1, 4.6), self.empty, body("b", 3, 5))) == [("overlap", "")]

    def test_excuses_no_run_that_goes_on_for_long(self) -> None:
        assert found(judge(body("a", 1, 9), self.empty, body("b", 3, 5))) == [("overlap", "")]

    @pytest.mark.parametrize(("fence", "excuse"), [(1, FORGOT), (3, "")])
    def test_excuses_an_earlier_holder_that_was_slow_to_begin(self, fence: int, excuse: str) -> None:
        lines = body("a", 2.5, 4, fence=2), self.empty, body("b", 3.5, 4.1, fence=fence)
        assert found(judge(*lines))[:1] == [("overlap", excuse)]

    def test_excuses_nothing_where_a_majority_remembers(self) -> None:
        assert found(judge(body("a", 1, 4), self.empty, body("b", 3, 5), quorum=2)) == [("overlap", "")]

    def test_excuses_no_overlap_before_it(self) -> None:
        late = fault("restarts empty", 6, 6.1, forgot="7000")
        assert found(judge(body("a", 1, 4), body("b", 3, 5), late)) == [("overlap", "")]


def test_a_body_after_the_success_of_its_message() -> None:
    assert found(judge(body("a", 1, 2, told="SUCCESS"), body("a", 3, 4, pid=2))) == [("again", "")]


def test_a_worker_that_was_killed_before_the_end_was_known_is_an_exception() -> None:
    lines = body("a", 1, 2), fault("kill", 1.9, 2.1, pids=[1], fate="killed"), body("a", 3, 4, pid=2)
    assert found(judge(*lines)) == [("again", KILLED)]


def test_a_worker_that_was_killed_after_the_end_was_known_is_not_an_excuse() -> None:
    lines = body("a", 1, 2, told="SUCCESS"), fault("kill", 1.9, 2.1, pids=[1], fate="killed"), body("a", 3, 4, pid=2)
    assert found(judge(*lines)) == [("again", "")]


def test_a_body_whose_end_reached_no_lock_server_is_an_exception() -> None:
    lines = (
        body("a", 1, 2),
        fault("partition", 1.9, 8, silent=["*/0"]),
        body("a", 6, 7, pid=2),
        end_of("a", 9, "SUCCESS"),
    )
    assert found(judge(*lines)) == [("again", SILENT)]


def test_a_worker_that_was_killed_before_the_end_reached_a_lock_server_is_an_exception() -> None:
    silence, death = fault("partition", 1.9, 8, silent=["*/0"]), fault("kill", 4, 4.1, pids=[1], fate="killed")
    lines = body("a", 1, 2, told="SUCCESS"), silence, death, body("a", 6, 7, pid=2)
    assert found(judge(*lines)) == [("again", SILENT)]


@pytest.mark.parametrize(("fate", "excuse"), [("frozen", SILENT), ("stopped", "")])
def test_a_worker_that_was_frozen_while_the_lock_server_was_back_is_an_exception(fate: str, excuse: str) -> None:
    """It did not notice, and when it resumed the server was gone again."""
    silences = fault("partition", 1.9, 4, silent=["*/0"]), fault("partition", 7, 10, silent=["*/0"])
    lines = body("a", 1, 2), [*silences], fault("worker: frozen", 3.9, 7, pids=[1], fate=fate), body("a", 8.5, 9, pid=2)
    assert found(judge(*lines)) == [("again", excuse)]


@pytest.mark.parametrize(("until", "excuse"), [(8, SILENT), (5, "")])
def test_a_worker_that_was_ending_lives_until_it_has_ended(until: float, excuse: str) -> None:
    """It got SIGQUIT before the end of the body."""
    silence, death = fault("partition", 1.9, until, silent=["*/0"]), fault("quit", 1, 7.5, pids=[1], fate="killed")
    lines = body("a", 1, 2, told="SUCCESS"), silence, death, body("a", 12, 13, pid=2)
    assert found(judge(*lines)) == [("again", excuse)]


def test_an_end_of_a_stopped_run_after_a_success_is_not_an_excuse() -> None:
    """Such an end is reported only after it is recorded."""
    silence = fault("partition", 0, 1.9, silent=["*/0"])
    lines = silence, end_of("a", 1, "SUCCESS"), end_of("a", 2, "FAILURE", error="LockLost")
    assert found(judge(*lines)) == [("told twice", "")]


def test_a_silence_that_was_over_is_not_an_excuse() -> None:
    lines = body("a", 1, 2), fault("partition", 0, 1.9, silent=["*/0"]), body("a", 6, 7, pid=2)
    assert found(judge(*lines)) == [("again", "")]


@pytest.mark.parametrize(("until", "excuse"), [(8, SILENT), (5, "")])
def test_a_stopped_run_whose_end_reached_no_lock_server_is_an_exception(until: float, excuse: str) -> None:
    silence = fault("partition", 0.5, until, silent=["*/0"])
    lines = body("a", 1, 2, how=""), silence, end_of("a", 2.1, "FAILURE", error="LockLost"), body("a", 7, 7.5, pid=2)
    assert found(judge(*lines)) == [("again", excuse)]


def test_a_silence_that_ended_before_the_copy_ran_is_not_an_excuse() -> None:
    lines = body("a", 1, 2), fault("partition", 1.9, 4, silent=["*/0"]), body("a", 6, 7, pid=2)
    assert found(judge(*lines)) == [("again", "")]


def test_a_silence_on_another_host_is_not_an_excuse() -> None:
    lines = body("a", 1, 2), fault("partition", 1.9, 8, silent=["west/0"]), body("a", 6, 7, pid=2)
    assert found(judge(*lines)) == [("again", "")]


@pytest.mark.parametrize(("nodes", "excuse"), [(2, ""), (3, SILENT)])
def test_a_redlock_is_silent_where_no_quorum_answers(nodes: int, excuse: str) -> None:
    cuts = [fault("partition", 1.9, 8, silent=[f"east/{number}"]) for number in range(nodes)]
    lines = body("a", 1, 2), cuts, body("a", 6, 7, pid=2)
    assert found(judge(*lines, quorum=3, servers=5)) == [("again", excuse)]


def test_a_worker_that_was_killed_long_after_the_end_is_not_an_excuse() -> None:
    lines = body("a", 1, 2), fault("kill", 3.5, 3.6, pids=[1], fate="killed"), body("a", 4, 5, pid=2)
    assert found(judge(*lines)) == [("again", "")]


@pytest.mark.parametrize(("latest", "excuse"), [(True, ""), (False, FORGOT)])
def test_older_data_have_what_was_written_before(latest: bool, excuse: str) -> None:
    older = fault("older data", 5, 5.5, forgot="7000", latest=latest)
    assert found(judge(body("a", 1, 2, told="SUCCESS"), older, body("a", 6, 7, pid=2))) == [("again", excuse)]


def test_a_primary_that_was_deposed_is_an_exception_for_its_locks_only() -> None:
    deposed = fault("deposed", 0.5, 2.5, forgot="7000", latest=True, but_ends=True)
    assert found(judge(body("a", 1, 2, told="SUCCESS"), deposed, body("a", 4, 5, pid=2))) == [("again", "")]
    assert found(judge(body("a", 1, 3), deposed, body("b", 2.2, 4, pid=2))) == [("overlap", FORGOT)]


@pytest.mark.parametrize(("fate", "excuse"), [("killed", KILLED_RETRYING), ("", "")])
def test_an_attempt_that_was_killed_as_it_retried_may_run_again(fate: str, excuse: str) -> None:
    first = body("a", 1, 2, last=False)
    second = body("a", 4, 5, pid=2, retries=1, told="SUCCESS")
    lines = first, fault("kill", 3.5, 3.6, pids=[1], fate=fate), second, body("a", 6, 7, pid=3, last=False)
    assert found(judge(*lines)) == [("again", excuse)]


def test_a_worker_that_was_frozen_before_the_end_was_recorded_is_an_exception() -> None:
    frozen = fault("worker: frozen", 2.1, 9, pids=[1], fate="frozen")
    assert found(judge(body("a", 1, 2), frozen, body("a", 7, 8, pid=2))) == [("again", FROZEN_AT_THE_END)]


@pytest.mark.parametrize(
    ("began", "start", "excuse"), [(2, 7.2, FROZEN_AT_THE_END), (5, 7.2, ""), (2, 9, "")], ids=["", "shortly", "late"]
)
def test_a_worker_whose_body_ended_when_it_resumed_is_an_exception(began: float, start: float, excuse: str) -> None:
    """Its lease had ended, and another message took the lock before the end was recorded."""
    frozen = fault("worker: frozen", began, 6.9, pids=[1], fate="frozen")
    first = [line for line in body("a", 1, 7) if not began < line["at"] < 6.9]
    assert found(judge(first, frozen, body("a", start, 10, pid=2))) == [("again", excuse)]


def test_a_frozen_child_before_the_record_is_not_an_excuse() -> None:
    stopped = fault("child: stopped", 2.1, 9, pids=[1], fate="stopped")
    assert found(judge(body("a", 1, 2), stopped, body("a", 7, 8, pid=2))) == [("again", "")]


@pytest.mark.parametrize("error", ["LockLost", "ConnectionError", "Reject"])
def test_an_end_without_a_fault_that_explains_it_is_not_an_excuse(error: str) -> None:
    sending = {**sent("a"), "policy": "skip"}
    lines = sending, end_of("a", 1, "FAILURE", error=error), body("a", 2, 3, told="SUCCESS")
    assert found(judge(*lines)) == [("again", ""), ("told twice", "")]


def test_a_task_that_was_failed_after_its_success_is_an_exception_too() -> None:
    """Celery keeps the success that it has stored."""
    cut = fault("broker: connections cut", 0.5, 0.6)
    lines = cut, body("a", 0.7, 0.9, told="SUCCESS"), end_of("a", 1, "FAILURE", error="ConnectionError")
    assert found(judge(*lines)) == [("told twice", UNTOLD)]


def test_what_follows_on_such_a_task_may_not_be_sent() -> None:
    """The reply was lost by which Celery's worker of the last part learns that it is to send the body of a chord."""
    cut = fault("broker: connections cut", 0.5, 0.6)
    lines = cut, body("a", 0.7, 0.9, told="SUCCESS"), end_of("a", 1, "FAILURE", error="ConnectionError")
    assert ("lost", UNTOLD) in found(judge(*lines, sent("b", after=("a",))))


def test_a_success_after_such_a_failure_is_not_an_excuse() -> None:
    """No next attempt was sent: a copy found that the message had ended."""
    cut, ran = fault("broker: connections cut", 0.5, 0.6), body("a", 0.7, 0.9)
    lines = sent("a"), cut, ran, end_of("a", 1, "FAILURE", error="ConnectionError"), end_of("a", 2, "SUCCESS", pid=2)
    assert found(judge(*lines)) == [("told twice", "")]


def test_an_attempt_before_the_success_is_not_a_second_body() -> None:
    assert found(judge(body("a", 1, 2, last=False), body("a", 3, 4, told="SUCCESS"))) == []


def test_a_body_after_another_end() -> None:
    lines = end_of("a", 1, "REVOKED"), body("a", 2, 3)
    assert found(judge(*lines)) == [("again", "")]


def test_a_message_that_was_rejected_and_came_again_is_an_exception() -> None:
    lines = end_of("a", 1, "FAILURE", error="Reject"), body("a", 2, 3, told="FAILURE")
    assert found(judge(*lines)) == [("again", REJECTED)]


@pytest.mark.parametrize("error", ["ChordError", "ConnectionError"])
@pytest.mark.parametrize(("after", "excuse"), [(("step",), UNSENT), ((), "")])
def test_a_step_that_celery_took_for_unsent_is_an_exception(error: str, after: tuple[str, ...], excuse: str) -> None:
    cut = fault("broker: connections cut", 0.5, 0.6)
    ends = end_of("a", 1, "FAILURE", error=error), body("a", 2, 3, told="SUCCESS")
    assert found(judge(sent("a", after=after), cut, *ends)) == [("again", excuse), ("told twice", excuse)]


@pytest.mark.parametrize(("error", "excuse"), [("Reject", REJECTED), ("LockLost", "")])
def test_an_attempt_that_celery_rejected_as_it_retried_may_come_again(error: str, excuse: str) -> None:
    """Its next attempt was sent and succeeded; nothing was recorded of this attempt."""
    retry = {"at": 2.5, "event": "taken", "message": "a", "retries": 1}
    cut, rejected = fault("broker: connections cut", 1.5, 1.6), end_of("a", 2.1, "FAILURE", error=error)
    ran = body("a", 1, 2, last=False), rejected, retry, body("a", 3, 4, retries=1, told="SUCCESS")
    verdict = judge({**sent("a"), "policy": ""}, cut, *ran, body("a", 5, 6, pid=3, last=False))
    assert [one.excuse for one in verdict.findings if one.at == 5] == [excuse]


@pytest.mark.parametrize(("kind", "excuse"), [("broker: restarts with its data", UNSENT), ("broker: stalled", "")])
def test_a_result_backend_that_loads_its_data_has_started_before(kind: str, excuse: str) -> None:
    ends = end_of("a", 1, "FAILURE", error="BusyLoadingError"), body("a", 2, 3, told="SUCCESS")
    lines = sent("a", after=("step",)), fault(kind, 0.5, 0.6), *ends
    assert found(judge(*lines)) == [("again", excuse), ("told twice", excuse)]


@pytest.mark.parametrize("error", ["Reject", "ConnectionError"])
@pytest.mark.parametrize(("retries", "excuse"), [(1, UNSENT), (0, "")])
def test_a_retry_that_celery_took_for_unsent_was_sent(error: str, retries: int, excuse: str) -> None:
    taken = {"at": 1.5, "event": "taken", "message": "a", "retries": retries}
    told = end_of("a", 1, "FAILURE", error=error), body("a", 2, 3, told="SUCCESS", retries=retries)
    lines = {**sent("a"), "policy": "retry"}, fault("broker: connections cut", 0.5, 0.6), taken, *told
    assert found(judge(*lines)) == [("again", excuse), ("told twice", excuse)]


def test_a_retry_that_celery_took_for_unsent_without_a_fault_is_not_an_excuse() -> None:
    taken = {"at": 1.5, "event": "taken", "message": "a", "retries": 1}
    told = end_of("a", 1, "FAILURE", error="Reject"), body("a", 2, 3, told="SUCCESS", retries=1)
    assert found(judge({**sent("a"), "policy": "retry"}, taken, *told)) == [("again", ""), ("told twice", "")]


@pytest.mark.parametrize(("recorded", "pid", "excuse"), [(0.8, 1, FORGOT), (1.5, 1, ""), (0.8, 2, "")])
def test_an_end_that_was_forgotten_before_it_was_reported(recorded: float, pid: int, excuse: str) -> None:
    """The same process recorded it before the lock server came back empty, and reported it afterwards."""
    record = {"at": recorded, "event": "recorded", "message": "a", "pid": pid}
    empty, end = fault("restarts empty", 1, 1.2, forgot="7000"), end_of("a", 2, "FAILURE", error="LockLost")
    verdict = judge(record, empty, end, body("a", 3, 4, pid=3, told="SUCCESS"))
    assert found(verdict) == [("again", excuse), ("told twice", excuse)]


def test_a_stopped_run_that_could_not_be_recorded_is_not_an_excuse() -> None:
    silence = fault("partition", 0, 0.5, silent=["east/0"])
    lines = silence, end_of("a", 1, "FAILURE", error="LockLost"), body("a", 2, 3, told="SUCCESS")
    assert found(judge(*lines)) == [("again", ""), ("told twice", "")]


def test_a_message_without_an_end_is_not_lost_before_the_storm_is_over() -> None:
    taken = {"at": 0.5, "event": "taken", "message": "a"}
    assert Checker(TTL).judge([sent("a"), taken], is_over=False).findings == []


def test_a_tick_that_two_beats_sent() -> None:
    lines = body("a", 1, 2, due="10:00"), body("b", 3, 4, due="10:00"), body("c", 5, 6, due="10:01")
    assert found(judge(*lines)) == [("again", "")]


def test_a_fence_that_went_back() -> None:
    assert found(judge(body("a", 1, 2, fence=8), body("b", 3, 4, fence=7))) == [("fence", "")]


def test_a_fence_that_stayed() -> None:
    assert found(judge(body("a", 1, 2, fence=8), body("b", 3, 4, fence=8))) == [("fence", "")]


def test_an_end_that_changed() -> None:
    assert found(judge(end_of("a", 1, "REVOKED"), end_of("a", 2, "SUCCESS"))) == [("told twice", "")]


@pytest.mark.parametrize(("until", "excuse"), [(8, SILENT), (3, "")])
def test_a_success_unknown_to_the_lock_server_may_be_followed_by_a_refusal(until: float, excuse: str) -> None:
    silence, death = fault("failover", 1.9, until, silent=["*/0"]), fault("kill", 5, 5.1, pids=[1], fate="killed")
    lines = body("a", 1, 2, told="SUCCESS"), silence, death, end_of("a", 9, "FAILURE", error="LockConflict", pid=2)
    assert found(judge(*lines)) == [("told twice", excuse)]


@pytest.mark.parametrize(("until", "excuse"), [(8, SILENT), (3, "")])
def test_a_refusal_may_be_followed_by_the_end_of_a_run_unknown_to_the_lock_server(until: float, excuse: str) -> None:
    silence = fault("partition", 1.9, until, silent=["*/0"])
    refusal, late = end_of("a", 6, "REVOKED", pid=2), end_of("a", 9, "FAILURE", error="ConnectionError", pid=1)
    assert found(judge(body("a", 1, 2), silence, refusal, late)) == [("told twice", excuse)]


def test_an_end_that_two_copies_reported() -> None:
    assert found(judge(end_of("a", 1, "SUCCESS"), end_of("a", 2, "SUCCESS"))) == []


def test_a_message_without_an_end_is_lost() -> None:
    taken = {"at": 0.5, "event": "taken", "message": "a"}
    assert found(judge(sent("a"), taken, body("a", 1, 2, how=""))) == [("lost", "")]


def test_a_next_step_that_was_never_sent_is_lost() -> None:
    assert found(judge(end_of("a", 1, "SUCCESS"), sent("b", after=("a",)))) == [("lost", "")]


def test_a_message_that_may_not_have_been_sent_is_not_lost() -> None:
    assert found(judge(sent("a"), {"at": 1, "event": "unsure", "message": "a"})) == []


def test_messages_that_the_broker_lost_are_counted_separately() -> None:
    verdict = judge(sent("a"), sent("b"), [{"at": at, "event": event, "message": "b"} for at, event in QUEUED_AGAIN])
    assert found(verdict) == [("lost", LOST_BY_BROKER)] * 2


def test_an_attempt_that_the_broker_lost_counts_though_an_earlier_one_came_again() -> None:
    retry = {"at": 1, "event": "queued", "message": "a", "retries": 1}
    again = {"at": 2, "event": "taken", "message": "a", "retries": 0}
    assert found(judge(sent("a"), retry, again)) == [("lost", LOST_BY_BROKER)]


def test_a_message_that_a_worker_has_was_not_lost_by_the_broker() -> None:
    queue = [{"at": at, "event": event, "message": "a"} for at, event in ((1, "queued"), (2, "taken"))]
    assert found(judge(sent("a"), queue)) == [("lost", "")]


@pytest.mark.parametrize(("before", "wrong"), [("SUCCESS", 1), ("REVOKED", 1), ("FAILURE", 0)])
def test_the_next_step_of_a_chain_gets_an_end(before: str, wrong: int) -> None:
    first = {"at": 0.5, "event": "taken", "message": "a"}
    assert found(judge(sent("a"), first, sent("b", after=("a",)), end_of("a", 1, before))) == [("lost", "")] * wrong


@pytest.mark.parametrize(("what", "broken"), [("message", "stuck"), ("lock", "left"), ("key", "left")])
def test_leftovers_are_found(what: str, broken: str) -> None:
    left = {"at": 9, "event": "left", "what": what, "name": "a", "text": "is there"}
    assert found(judge(left)) == [(broken, "")]


def test_a_message_that_waits_is_not_lost_as_well() -> None:
    left = {"at": 9, "event": "left", "what": "message", "name": "a", "text": "is there"}
    assert found(judge(sent("a"), left)) == [("stuck", "")]


def test_recovery_is_the_time_to_the_next_body_of_a_key_that_was_running() -> None:
    other = body("c", 1, 1.5, key="other"), body("d", 9, 9.5, key="other")
    verdict = judge(body("a", 1, 2, how=""), fault("kill", 2, 2.5, pids=[1]), body("b", 4, 5, pid=2), *other)
    assert verdict.recovery == {"kill": [1.5]}


def test_a_finding_counts_with_the_faults_before_it() -> None:
    lines = fault("slow", 1, 2), body("a", 3, 5), body("b", 4, 6), fault("kill", 50, 51)
    verdict = judge(*lines)
    assert [verdict.of(kind, "overlap", TTL) for kind in ("slow", "kill")] == [1, 0]
