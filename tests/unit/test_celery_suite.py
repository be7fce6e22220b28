"""The comparison that `make celery-suite` makes; the suite itself runs there only."""

from __future__ import annotations

from tests.celery_suite.__main__ import README, differing, expected


def test_list_of_differences_is_read() -> None:
    named = expected(README.read_text())
    assert named
    assert all(test.startswith("t/") and "::" in test and reason for test, reason in named.items())


def test_what_only_one_run_had_differs_as_well() -> None:
    assert differing({"a": "passed", "b": "passed", "c": "failed"}, {"a": "passed", "b": "failed"}) == ["b", "c"]
