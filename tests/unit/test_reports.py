"""Processes of a pool report their locks to the main process through a pipe."""

from __future__ import annotations

import os

import pytest

from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task import reports


def test_full_pipe_blocks_nobody_and_loses_only_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process reads when it has time; until then the child goes on, and renews for itself."""
    monkeypatch.setattr(reports, "_channel", None)
    writer, owners = reports.open_channel(), [new_owner() for _ in range(5000)]
    deliveries = {owner: reports.expect(owner) for owner in owners}
    with monkeypatch.context() as in_child:
        assert reports._channel is not None
        in_child.setattr(reports, "_channel", reports._channel._replace(pid=os.getppid()))
        for owner in owners:
            assert reports.send(reports.Report(owner, "k", 30.0, 1, owner))
        with pytest.raises(BlockingIOError):
            os.write(writer, b"x" * reports.MAX_SIZE)
    reports.receive()
    heard = [owner for owner, its in deliveries.items() if its.report is not None]
    assert heard == owners[: len(heard)], "the oldest, without a gap"
    assert len(heard) > 100
