"""Who notices that a lock server does not answer, or answers again; with a server that a test silences."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from celery_singleton_lock import LockUnavailable, clock, forks, server_watch
from celery_singleton_lock.server_watch import ServerWatch
from celery_singleton_lock.worker.silences import MAX_SIZE, Silences, report
from tests.patience import until


class Server:
    """A lock server that is asked about keys."""

    name = "redis://locks"

    def __init__(self) -> None:
        self.is_silent = True
        self.asked: list[str] = []

    def ask(self, key: str) -> None:
        self.asked.append(key)
        if self.is_silent:
            raise self.error()

    def error(self) -> LockUnavailable:
        return LockUnavailable(self.name, "refused")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often, and take the first answer for the end."""
    monkeypatch.setattr(server_watch, "ASK_AFTER", 0.02)
    monkeypatch.setattr("celery_singleton_lock.outage.QUIET", 0.0)
    _others[:] = [it for it in threading.enumerate() if it.name == "singleton-lock-outage"]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def watch(server: Server) -> ServerWatch:
    return ServerWatch(server.name, server.ask, list)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The levels of the lines about the server's outages with a text: what earlier tests have left may go on to log."""
    caplog.set_level(logging.DEBUG)

    def of_outages(text: str) -> list[str]:
        records = [record for record in caplog.records if record.module in ("outage", "server_watch")]
        said = [(record.levelname, record.getMessage()) for record in records]
        return [level for level, message in said if text in message and Server.name in message]

    return of_outages


#: Threads of other tests, whose servers are gone for good.
_others: list[threading.Thread] = []


def threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name == "singleton-lock-outage" and it not in _others]


def test_end_is_noticed_by_a_process_that_needs_the_server_no_longer(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    watch.failed(server.error(), "k")
    until(lambda: len(server.asked) >= 3, "it has asked several times")
    assert said("answers again") == []
    server.is_silent = False
    until(lambda: said("answers again") == ["WARNING"])
    until(lambda: not threads(), "the thread ends with the outage")
    assert {*server.asked} == {"k"}


def test_nobody_is_asked_while_others_ask(server: Server, watch: ServerWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "ASK_AFTER", 60.0)
    monkeypatch.setattr(watch._later, "want", lambda: None)
    watch.failed(server.error(), "k")
    watch.look("k", "refused")
    assert 0 < (watch._look() or 0) <= 60.0
    assert server.asked == []


def test_silence_that_a_child_reports_is_looked_into(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    watch.look("child's", "refused")
    until(lambda: said("trying again") == ["WARNING"])
    assert server.asked[0] == "child's"
    server.is_silent = False
    until(lambda: said("answers again") == ["WARNING"])


def test_silence_that_is_over_when_it_is_looked_into_is_one_line(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    server.is_silent = False
    watch.look("k", "reset")
    until(lambda: server.asked and not threads())
    assert said(server.name) == said("lock server redis://locks: reset; it answers by now") == ["WARNING"]


def test_reports_one_after_the_other_are_one_question_a_second(
    server: Server, watch: ServerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [clock.now()]
    monkeypatch.setattr(server_watch, "clock", SimpleNamespace(now=lambda: now[0]))
    monkeypatch.setattr(watch._later, "want", lambda: None)
    server.is_silent = False

    def look() -> float | None:
        watch.look("k", "reset")
        return watch._look()

    assert look() is None
    assert [look() for _ in range(10)] == [pytest.approx(server_watch.ASK_AFTER)] * 10
    assert len(server.asked) == 1
    now[0] += server_watch.ASK_AFTER
    assert look() is None
    assert len(server.asked) == 2


def test_other_answers_do_not_end_an_outage(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    """A server that is out of memory still renews leases."""
    watch.failed(server.error(), "k")
    for _ in range(3):
        watch.answered()
        asked = len(server.asked)
        until(lambda: len(server.asked) > asked)  # noqa: B023 - called at once
    assert said(server.name) == ["WARNING"]
    server.is_silent = False
    until(lambda: not threads())
    assert said("answers again") == ["WARNING"]


def test_child_leaves_the_outage_to_its_main_process(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    silences = Silences()
    watch.watch_for_children(partial(report, silences.writer), list)
    watch.start_anew()  # As after a fork.
    watch.failed(server.error(), "k")
    assert said("trying again") == ["DEBUG"]
    assert silences.latest() == ("k", "refused")
    watch.answered()
    assert said("answers again") == ["DEBUG"]
    assert server.asked == []


def test_fork_without_a_main_process_watches_for_itself(
    server: Server, watch: ServerWatch, said: Callable[[str], list[str]]
) -> None:
    watch.failed(server.error(), "k")
    forks._start_all_anew()
    watch.failed(server.error(), "k")
    assert said("trying again") == ["WARNING", "WARNING"]
    server.is_silent = False
    until(lambda: not threads())


def test_leases_of_the_children_count(
    server: Server, said: Callable[[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    class Lease:
        give_up_at = clock.now() + 60.0

        def in_words(self) -> str:
            return "task shop.bill[id]"

    watch = ServerWatch(server.name, server.ask, lambda: [Lease()])
    watch.watch_for_children(lambda key: None, lambda: [Lease(), Lease()])
    watch.failed(server.error(), "k")
    assert "3 leases are given up unless" in caplog.text
    server.is_silent = False
    until(lambda: not threads())


def test_thread_ends_with_what_it_works_for(server: Server) -> None:
    watch = ServerWatch(server.name, server.ask, list)
    watch.failed(server.error(), "k")
    until(threads)
    gone = weakref.ref(watch)
    del watch

    def is_gone() -> bool:
        gc.collect()
        return gone() is None and not threads()

    until(is_gone)


class TestSilences:
    def test_latest_report_of_a_child_counts(self) -> None:
        silences = Silences()
        assert silences.latest() is None
        pid = os.fork()
        if pid == 0:
            report(silences.writer, "first", "refused")
            report(silences.writer, "späť", "reset")
            os._exit(0)
        os.waitpid(pid, 0)
        assert silences.latest() == ("späť", "reset")
        assert silences.latest() is None

    def test_full_pipe_blocks_nobody(self) -> None:
        silences = Silences()
        for number in range(100_000):
            report(silences.writer, f"key-{number:09}", "refused")
        assert str(silences.latest()).startswith("('key-")
        assert silences.latest() is None

    def test_reports_are_short(self) -> None:
        silences = Silences()
        report(silences.writer, "k" * MAX_SIZE, "\U0001f600" * MAX_SIZE)
        key, reason = silences.latest() or ("", "")
        assert key.startswith("kkk")
        assert reason.startswith("\U0001f600")

    def test_nonsense_is_not_believed(self) -> None:
        silences = Silences()
        for line in (b"nonsense\n", b"[1]\n", b"\xff\n"):
            os.write(silences.writer, line)
            assert silences.latest() is None
