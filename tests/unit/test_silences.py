"""Processes of a pool report to their main process that a lock server did not answer them."""

from __future__ import annotations

import os

from celery_singleton_lock.worker.silences import MAX_SIZE, Silences, report


def test_latest_report_of_a_child_counts() -> None:
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


def test_full_pipe_blocks_nobody() -> None:
    silences = Silences()
    for number in range(100_000):
        report(silences.writer, f"key-{number:09}", "refused")
    assert str(silences.latest()).startswith("('key-")
    assert silences.latest() is None


def test_reports_are_short() -> None:
    silences = Silences()
    report(silences.writer, "k" * MAX_SIZE, "\U0001f600" * MAX_SIZE)
    key, reason = silences.latest() or ("", "")
    assert key.startswith("kkk")
    assert reason.startswith("\U0001f600")


def test_nonsense_is_not_believed() -> None:
    silences = Silences()
    for line in (b"nonsense\n", b"[1]\n", b"\xff\n"):
        os.write(silences.writer, line)
        assert silences.latest() is None
