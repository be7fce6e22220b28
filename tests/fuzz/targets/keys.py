"""Keys of calls: equal for equal arguments, different for different ones, the same on both sides of a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu import serialization

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys.key import check_lock_key, is_key, key_of_call, key_of_text, name_in
from tests.fuzz.choices import Case, Choices

TEMPLATES = ("{a}:{b}", "t%{a}-{b}", "{a!r}x{b}", "{a:>9}:{b}", "{a:.2f}/{b:d}", "{a.real}:{b}", "{a[0]}:{b}", "{b}")
VALID = {"a": [1, {"x": "y", "z": [None, 1.5]}], "b": "march"}


def run(a: Any, b: Any = 7) -> None: ...


def run_with_others(a: Any, *rest: Any, b: Any = 7, **others: Any) -> None: ...


def received(body: Any) -> Any:
    content_type, encoding, data = serialization.dumps(body, serializer="json")
    return serialization.loads(data, content_type, encoding, accept=[content_type])


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


def same(one: Any, other: Any) -> bool:
    """Whether they are equal as JSON, and of one type."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and (repr(one) == repr(other) if isinstance(one, float) else one == other)


def _arguments(choices: Choices) -> None:
    given = {name: choices.mutated(value) for name, value in VALID.items()}
    function, lock_key = choices.pick((run, run_with_others)), choices.pick((None, ["a"], []))
    here = key(lock_key, function, (given["a"],), {"b": given["b"]})
    try:
        args, kwargs = received([[given["a"]], {"b": given["b"]}])
    except Exception:  # No message can contain it.
        return
    assert key(lock_key, function, args, kwargs) == here
    assert key(lock_key, function, (), {"a": args[0], **kwargs}) == here


def _pairs(choices: Choices) -> None:
    try:
        one, other = received([choices.mutated(VALID), choices.mutated(VALID)])
    except Exception:  # No message can contain it.
        return
    keys = [key(None, run, (it,), {}) for it in (one, other)]
    assert None in keys or (keys[0] == keys[1]) == same(one, other)


def _templates(choices: Choices) -> None:
    template = choices.pick(TEMPLATES)
    one, other = ([choices.value(1), choices.value(1)] for _ in range(2))
    keys = [key(template, run, it, {}) for it in (one, other)]
    plain = template in TEMPLATES[:2] and all(isinstance(it, str) for it in (*one, *other))
    if plain and None not in keys:
        assert (keys[0] == keys[1]) == (one == other)


def _own_templates(choices: Choices) -> None:
    lock_key = choices.mutated(choices.pick([TEMPLATES[0], ["a", "b"]]))
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


_CASES = (_arguments, _pairs, _templates, _own_templates, _names)


@contextmanager
def cases() -> Iterator[Case]:
    yield lambda choices: choices.pick(_CASES)(choices)
