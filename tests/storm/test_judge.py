"""Histories with a known fault: the judge finds that fault, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from celery_singleton_lock.options.rules import SCOPES, UNTIL_EXECUTED, WHILE_EXECUTING
from tests.storm.judge import judge
from tests.storm.soak import LOOKS, grown

TTL, QUEUE_TTL = 4.0, 15.0

Lines = list[dict[str, Any]]


def line(event: str, at: float, message: str = "a", **fields: Any) -> dict[str, Any]:
    return {"at": at, "host": "", "pid": 1, "event": event, "message": message, **fields}


def body(message: str, start: float, end: float, *, how: str = "done", **fields: Any) -> Lines:
    """A body that writes all the time; `how=""` if it was killed."""
    run = f"{message}-{start}"
    lines = [line("start", start, message, run=run, **{"key": "k", "fence": start, "limit": 1, "due": None, **fields})]
    lines += [line("beat", end, message, run=run)]
    return [*lines, line("end", end, message, run=run, how=how)] if how else lines


def told(message: str, at: float, state: str = "SUCCESS") -> dict[str, Any]:
    return line("told", at, message, state=state, of=message if state == "SUCCESS" else None)


def sent(message: str, at: float, *, task: str = "work", key: str = "k", known: float = 0.01) -> Lines:
    return [line("sending", at, message, task=task, key=key), line("sent", at + known, message)]


def found(*parts: Any, servers: int = 1) -> list[str]:
    lines = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return [one.broken for one in judge(lines, ttl=TTL, queue_ttl=QUEUE_TTL, servers=servers)]


def test_consecutive_bodies_are_fine() -> None:
    first = sent("a", 0), body("a", 1, 3), told("a", 3.1)
    assert found(*first, sent("b", 0), body("b", 3, 4), told("b", 4.1)) == []


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ({}, ["overlap"]),
        ({"key": "other"}, []),
        ({"limit": 2}, []),
    ],
)
def test_two_bodies_of_one_key_at_once(other: dict[str, Any], wrong: list[str]) -> None:
    assert found(body("a", 1, 3), body("b", 2, 4, **other)) == wrong


def test_long_run_overlaps_with_several_others() -> None:
    assert found(body("a", 1, 9), body("b", 2, 3), body("c", 8, 8.5)) == ["overlap"] * 2


def test_a_body_that_was_killed_ends_with_its_last_line() -> None:
    assert found(body("a", 1, 3, how=""), body("b", 3, 4)) == []


def test_fences_grow() -> None:
    assert found(body("a", 1, 2, fence=7), body("b", 3, 4, fence=7)) == ["fence"]


class TestEnds:
    ran = body("a", 1, 2)

    def test_two(self) -> None:
        assert found(self.ran, told("a", 2.1), told("a", 3, "FAILURE")) == ["two ends"]
        assert found(self.ran, told("a", 2.1), told("a", 3)) == []

    def test_of_a_message_that_has_not_run(self) -> None:
        assert found(told("a", 2.1)) == ["wrong end"]
        assert found(body("a", 1, 2, how="stopped"), told("a", 2.1)) == ["wrong end"]

    def test_a_body_after_it(self) -> None:
        assert found(self.ran, told("a", 2.1), body("a", 3, 4)) == ["again"]

    @pytest.mark.parametrize(
        ("kind", "begin", "servers", "wrong"),
        [
            ("lock server: stalled", 2.0, 1, []),
            ("lock server: stalled", 2.0, 5, ["again"]),
            ("lock server: stalled", 2.5, 1, ["again"]),
            ("worker: SIGKILL", 2.0, 1, ["again"]),
        ],
    )
    def test_may_be_unrecorded_where_no_lock_server_answers(
        self, kind: str, begin: float, servers: int, wrong: list[str]
    ) -> None:
        fault = {**line("fault", begin + 1, kind=kind), "begin": begin}
        assert found(self.ran, told("a", 2.1), fault, body("a", 4, 5), servers=servers) == wrong


def test_tick_that_two_messages_are_for() -> None:
    assert found(body("a", 1, 2, due="12:00"), body("b", 3, 4, due="12:01"), body("c", 5, 6, due="12:01")) == [
        "tick twice"
    ]


class TestSentTwice:
    @pytest.mark.parametrize("scope", [*SCOPES, "work"])
    def test_two_waiting_messages(self, scope: str) -> None:
        waiting = [sent(name, at, task=scope) for name, at in (("a", 1), ("b", 2))]
        ends = told("a", 9, "REVOKED"), told("b", 9, "REVOKED")
        assert found(*waiting, *ends) == ["sent twice"] * (scope not in (WHILE_EXECUTING, "work"))

    @pytest.mark.parametrize("later", [{"at": 3}, {"at": 2, "key": "other"}, {"at": 1 + QUEUE_TTL}])
    def test_a_lock_ends(self, later: dict[str, Any]) -> None:
        """A worker has had the message by then; it has another one; it has expired."""
        first = sent("a", 1, task=UNTIL_EXECUTED), told("a", 20, "REVOKED")
        taken = [line("taken", 2.5)] if later["at"] == 3 else []
        second = sent("b", **later, task=UNTIL_EXECUTED), told("b", 20, "REVOKED")
        assert found(*first, taken, *second) == []


class TestLost:
    def test_a_message_without_an_end(self) -> None:
        assert found(sent("a", 1)) == ["lost"]

    def test_unless_its_sender_does_not_know_that_it_was_sent(self) -> None:
        assert found(line("sending", 1, task="work", key="k"), line("unsure", 1)) == []

    @pytest.mark.parametrize(("last", "wrong"), [("queued", []), ("taken", ["lost"])])
    def test_unless_kombu_has_lost_it(self, last: str, wrong: list[str]) -> None:
        assert found(sent("a", 1), line("taken", 2), line("queued", 3), line(last, 4)) == wrong


def test_what_is_left() -> None:
    assert found(line("left", 1, text="a key without a time to live")) == ["left"]


def test_a_soak_finds_what_grows_after_the_warm_up() -> None:
    def samples(**values: Any) -> list[dict[str, float]]:
        return [{f"{unit} of it": value(number) for unit, value in values.items()} for number in range(LOOKS)]

    assert grown(samples(MB=lambda number: min(40.0 + number, 60.0))) == []
    assert grown(samples(keys=lambda number: 9000.0 if number == LOOKS - 5 else 1000.0)) == []
    leak = samples(MB=lambda number: 40.0 + number / 4, threads=lambda number: 7.0)
    assert [one.split()[0] for one in grown(leak)] == ["MB"]
