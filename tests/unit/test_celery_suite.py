"""The comparison that `make celery-suite` makes; only that command runs the suite itself."""

from __future__ import annotations

from tests.celery_suite.__main__ import README, differing, expected


def test_list_of_differences_is_read() -> None:
    named = expected(README.read_text())
    assert named
    assert all(test.startswith("t/") and "::" in test and reason for test, reason in named.items())


def test_test_of_only_one_run_is_a_difference() -> None:
    assert differing({"a": "passed", "b": "passed", "c": "failed"}, {"a": "passed", "b": "failed"}) == ["b", "c"]
