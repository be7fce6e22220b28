"""Keys by any `lock_key`, and of any name; `test_keys_roundtrip` has arguments of any value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys.key import check_lock_key, is_key, key_of_call, key_of_text, name_in
from tests.fuzz.choices import Case, Choices

TEMPLATES = ("{a}:{b}", "{a!r}x{b}", "{a:.2f}/{b:d}", "{a.real}:{b}", "{a[0]}:{b}")


def run(a: Any, b: Any = 7) -> None: ...


def key(lock_key: Any, function: Any, args: Any, kwargs: Any, name: str = "t") -> str | None:
    """The key, or None if there is none, which the error explains."""
    try:
        made = key_of_call("p", name, name, lock_key, function, args, kwargs).key
    except InvalidKey as error:
        assert "no lock key for task" in str(error)
        return None
    assert made.isprintable()
    assert len(made) < 200
    return made


def _own_templates(choices: Choices) -> None:
    lock_key = choices.mutated(choices.pick([*TEMPLATES, ["a", "b"]]))
    try:
        check_lock_key("t", lock_key, run)
    except InvalidOption as error:
        assert "lock_key of task t" in str(error)
        return
    key(lock_key, run, choices.some([1, "x", None, 10**400, float("inf"), [1]], most=3), {})


def _names(choices: Choices) -> None:
    one, other = choices.mutated("shop.bill", 2), choices.mutated("shop.bill", 2)
    if not (isinstance(one, str) and isinstance(other, str)):
        return
    keys = [key_of_text("p", name, "x") for name in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert all(name_in(each) for each in keys)
    assert all(is_key("p", each) for each, name in zip(keys, (one, other), strict=True) if name)


_CASES = (_own_templates, _names)


@contextmanager
def cases() -> Iterator[Case]:
    yield lambda choices: choices.pick(_CASES)(choices)
