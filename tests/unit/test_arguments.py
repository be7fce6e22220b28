"""How `locks show` and `locks explain` read the arguments of a call."""

from __future__ import annotations

from typing import Any

import click
import pytest

from celery_singleton_lock.cli.target import parsed


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("7", 7), ("-7", -7), ("1.5", 1.5), ("true", True), ("null", None), ("[1, 2]", [1, 2])),
        *(('{"a": "b=c"}', {"a": "b=c"}), ('"7"', "7"), ('"a=b"', "a=b"), ("march", "march"), ("", "")),
        *(("NaN", "NaN"), ("-Infinity", "-Infinity"), ("2026-11-01", "2026-11-01"), ("1=2", "1=2")),
    ],
)
def test_word_is_json_or_a_text(word: str, value: Any) -> None:
    assert parsed([word]) == ([value], {})


def test_name_and_value_are_a_keyword_argument() -> None:
    assert parsed(["1", "full=true", "month=march", "empty=", "url=a=b"]) == (
        [1],
        {"full": True, "month": "march", "empty": "", "url": "a=b"},
    )


def test_keyword_given_twice_is_refused() -> None:
    with pytest.raises(click.UsageError, match="'full' is given twice"):
        parsed(["full=1", "full=2"])
