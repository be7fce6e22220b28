"""What the processes of a pool report to their main process through a real pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task import key_report
from celery_singleton_lock.task.key_report import MAX_SIZE, End, Report


class Delivery:
    def __init__(self) -> None:
        self.owner = new_owner()
        self._reported = key_report.expect(self.owner)

    @property
    def report(self) -> Report | None:
        return self._reported.report

    @property
    def give_up_at(self) -> float | None:
        return self._reported.give_up_at


def send(owner: str, key: str = "k") -> None:
    key_report.send(Report(owner, key, 30.0, 2, owner, "tenant=é"))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(key_report, "_channel", None)
    key_report.open_channel()
    opened = key_report._channel
    yield
    os.close(opened._reader)
    os.close(opened.writer)


def in_child(function: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_child_reports_its_key(channel: None) -> None:
    first, second = Delivery(), Delivery()
    in_child(lambda: send(second.owner, "kéy"))
    key_report.receive()
    assert second.report == Report(second.owner, "kéy", 30.0, 2, second.owner, "tenant=é")
    assert first.report is None


def test_report_of_a_child_that_dies_right_after_arrives(channel: None) -> None:
    delivery = Delivery()
    in_child(lambda: (send(delivery.owner), os.kill(os.getpid(), 0)))
    key_report.receive()
    assert delivery.report is not None


def test_child_reports_when_it_gives_up_its_lease(channel: None) -> None:
    delivery, other = Delivery(), Delivery()
    in_child(lambda: (send(delivery.owner), key_report.send(End(delivery.owner, 1234.5))))
    in_child(lambda: key_report.send(End(delivery.owner, 1244.25)))
    key_report.receive()
    assert delivery.give_up_at == 1244.25
    assert delivery.report is not None
    assert other.give_up_at is None


def test_execution_that_asks_again_has_no_lease_yet(channel: None) -> None:
    delivery = Delivery()
    in_child(lambda: (key_report.send(End(delivery.owner, 1234.5)), send(delivery.owner, "another")))
    key_report.receive()
    assert delivery.give_up_at is None


@pytest.mark.parametrize("at", ['"soon"', "null", "NaN", "[1.0]", "true"])
def test_nonsense_in_place_of_a_time_is_not_believed(channel: None, at: str) -> None:
    delivery = Delivery()
    os.write(key_report._channel.writer, f'["{delivery.owner}", {at}]\n'.encode())
    key_report.receive()
    assert delivery.give_up_at is None


def test_execution_in_the_main_process_needs_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_report, "_channel", None)
    delivery = Delivery()
    send(delivery.owner)
    assert delivery.report == Report(delivery.owner, "k", 30.0, 2, delivery.owner, "tenant=é")


def test_full_pipe_blocks_nobody(channel: None) -> None:
    delivery = Delivery()

    def many() -> None:
        for _ in range(5000):
            send(new_owner(), "k" * 100)

    in_child(many)
    key_report.receive()
    in_child(lambda: send(delivery.owner))
    key_report.receive()
    assert delivery.report is not None, "it goes on when there is room again"


def test_new_deliveries_make_room(channel: None) -> None:
    """The last reporter finds room, however long nobody asks for a report."""
    last = Delivery()
    for _ in range(50):
        in_child(lambda: [send(new_owner(), "k" * 1000) for _ in range(4)])
        key_report.make_room()
    in_child(lambda: send(last.owner))
    key_report.receive()
    assert last.report is not None


def test_too_long_report_is_left_out(channel: None) -> None:
    delivery, other = Delivery(), Delivery()
    in_child(lambda: send(delivery.owner, "k" * MAX_SIZE))
    in_child(lambda: send(other.owner))
    key_report.receive()
    assert delivery.report is None
    assert other.report is not None


def test_cut_lines_are_joined(channel: None) -> None:
    delivery = Delivery()
    line = Report(delivery.owner, "k", 30.0, 2, delivery.owner, "").dumps()
    os.write(key_report._channel.writer, b"nonsense\n[1]\n\xff\n" + line[:20])
    key_report.receive()
    assert delivery.report is None
    os.write(key_report._channel.writer, line[20:])
    key_report.receive()
    assert delivery.report is not None


def test_delivery_that_has_gone_is_not_kept(channel: None) -> None:
    delivery = Delivery()
    owner = delivery.owner
    del delivery
    in_child(lambda: send(owner))
    key_report.receive()
    assert owner not in key_report._reported


@pytest.mark.parametrize(
    "fields",
    [
        [new_owner(), "k", 10**400, 1, new_owner(), ""],
        [new_owner(), "k", 0.0, 1, new_owner(), ""],
        [new_owner(), "k", 30.0, float("inf"), new_owner(), ""],
        [new_owner(), "k", 30.0, 10**9, new_owner(), ""],
        ["owner", "k", 30.0, 1, new_owner(), ""],
        [new_owner(), 7, 30.0, 1, new_owner(), ""],
        [new_owner(), "k", 30.0, 1, new_owner()],
    ],
    ids=["ttl beyond floats", "no ttl", "no end of slots", "too many slots", "no owner", "no key", "too short"],
)
def test_foreign_line_does_not_count(fields: list[object]) -> None:
    """The fuzzer found the first one: the main process raised OverflowError when it looked for its children's locks."""
    assert Report.loads(json.dumps(fields).encode()) is None
    assert Report.loads(b"[" * 4000) is None
