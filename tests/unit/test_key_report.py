"""Processes of a pool report their locks to the main process through a pipe."""

from __future__ import annotations

import os

import pytest

from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task import key_report


@pytest.mark.timeout(30)
def test_full_pipe_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process reads when it has time; until then the child goes on, and renews for itself."""
    monkeypatch.setattr(key_report, "_channel", None)
    writer = key_report.open_channel()
    channel = key_report._channel
    assert channel is not None
    channel.pid = os.getppid()  # This is a child now.
    try:
        for _ in range(5000):
            assert key_report.send(key_report.End(new_owner(), 1.0))
        with pytest.raises(BlockingIOError):
            os.write(writer, b"x" * key_report.MAX_SIZE)
    finally:
        os.close(writer)
        os.close(channel._reader)
