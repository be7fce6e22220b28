"""Tests of exclusive tasks that need no Redis: `python -m pytest examples/testing`."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.testing import RecordedLocks, hold_lock
from examples.testing.tasks import bill, bill_all, rebuild_report


def test_two_spellings_are_one_call(singleton_locks: RecordedLocks) -> None:
    rebuild_report.apply((7,))
    singleton_locks.assert_acquired(rebuild_report, tenant_id=7, full=False)


def test_report_that_is_being_rebuilt_is_skipped(singleton_locks: RecordedLocks) -> None:
    with hold_lock(rebuild_report, 7):
        rebuild_report.apply((7,))
        rebuild_report.apply((8,))
    singleton_locks.assert_skipped(rebuild_report, 7)
    singleton_locks.assert_acquired(rebuild_report, 8)


def test_busy_tenants_are_reported(singleton_locks: RecordedLocks, eager: None) -> None:
    with hold_lock(bill, 7, month=1):
        assert bill_all(month=2) == [7]
    assert [event.policy for event in singleton_locks.assert_conflict(bill, 7, month=2)] == ["raise"]
    assert [event.args for event in singleton_locks.acquired] == [(8, 2)]


def test_skipped_task_ends_for_who_waits(singleton_locks: RecordedLocks, celery_worker: Any) -> None:
    with hold_lock(rebuild_report, 7), pytest.raises(TaskRevokedError, match="held by task hold-lock"):
        rebuild_report.delay(7).get(timeout=10)
    assert rebuild_report.delay(7).get(timeout=10) == "report of tenant 7 rebuilt"
    singleton_locks.assert_free(rebuild_report, 7)
