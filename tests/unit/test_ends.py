"""A value that a record keeps comes back as the same, or is not kept; and keeping it cannot harm the task."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from datetime import date
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import states
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import LockConflict, LockLost, ResultLost
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import MAX_CONTENT, End, Outcome
from tests.contrib.endings import Keyed, Odd

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def kept(value: object) -> End | None:
    return ends.end_of(ends.succeeded(value, is_awaited=True))


def kept_error(error: Exception) -> Exception | None:
    end = ends.end_of(ends.failed(error, is_awaited=True))
    return None if end is None else end.error


def exactly(value: Any) -> Any:
    """A form in which 1, 1.0 and True, or a list and a tuple, are different."""
    if isinstance(value, dict):
        return "dict", [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [exactly(item) for item in value]
    return type(value).__name__, repr(value)


@given(VALUES)
def test_value_comes_back_exactly_or_is_not_kept(value: object) -> None:
    end = kept(value)
    assert end is None or exactly(end.value) == exactly(value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 3.5, 2**200, float("inf"), -0.0, "", "text", "é😀\x00\n", "x" * 4000),
        *([], {}, [1, [2, [3]]], {"a": {"b": None}}, {"__type__": "bytes", "__value__": "x"}),
    ],
    ids=repr,
)
def test_plain_json_is_kept(value: object) -> None:
    end = kept(value)
    assert end is not None
    assert exactly(end.value) == exactly(value)


class Named(NamedTuple):
    a: int


class Hostile(dict[Any, Any]):
    def items(self) -> NoReturn:
        raise RuntimeError

    __len__ = __iter__ = __eq__ = items  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), {1: "a"}, {"a": (1,)}, {1}, b"bytes", date(2026, 11, 22), Decimal("1.10"), float("nan"), "\ud800"),
        *(Named(1), object(), len, ValueError("returned"), Hostile(a=1), [Hostile(a=1)], 10**5000),
        *("x" * MAX_CONTENT, "é" * 3000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_value_is_not_kept(value: object) -> None:
    assert kept(value) is None


def test_value_is_not_changed() -> None:
    """An overriding backend (Elasticsearch's) changes a dictionary that contains a result."""
    inner = [1]
    value = {"result": inner, "traceback": "x"}
    assert kept(value) == End(value)
    assert value["result"] is inner


@pytest.mark.parametrize(
    "make",
    [
        lambda: [None] * 5_000_000,
        lambda: ["x" * 1000] * 1_000_000,
        lambda: dict.fromkeys(map(str, range(1_000_000))),
        lambda: [[1] * 100] * 100_000,
    ],
)
def test_large_value_costs_no_more_than_one_at_the_limit(make: Any) -> None:
    """The cost is counted in executed lines, not in time."""
    value, lines = make(), 0

    def count(*_: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert kept(value) is None
    finally:
        sys.settrace(before)
    assert lines < 200_000


def test_value_that_contains_itself_is_not_kept() -> None:
    around: list[Any] = []
    around.append(around)
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    assert kept(around) is None
    assert kept(deep) is None
    while deep is not None:  # Step by step: the interpreter would free it in one deep recursion.
        deep = deep[0]


class Plain(Exception):
    pass


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Around:
    class Inner(ValueError):
        pass


def raised(body: Any) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011 - any
        body()
    return info.value


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: ValueError(), lambda: ValueError("x", 1, None, [2]), lambda: Plain("x"), lambda: Odd(7)),
        *(lambda: Keyed(reason="x"), lambda: Around.Inner("x"), StopIteration, lambda: raised(lambda: 1 / 0)),
        *(lambda: raised(lambda: {}["k"]), lambda: raised(lambda: int("x")), lambda: WorkerLostError("x", 9)),
        *(lambda: LockConflict("k", "t", 1.0), lambda: LockLost("k", "r"), lambda: ResultLost("t", "i", 1)),
        lambda: TimeLimitExceeded(5),
    ],
)
def test_exception_comes_back_as_it_was(make: Any) -> None:
    error = make()
    again = kept_error(error)
    assert again is not None
    assert again is not error
    assert type(again) is type(error)
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))


@pytest.mark.parametrize("make", [lambda: raised(lambda: os.stat("/nowhere")), lambda: ImportError("x", name="n")])
def test_built_in_exception_with_fields_of_its_own_keeps_them(make: Any) -> None:
    error = make()
    again = kept_error(error)
    assert again is not None
    assert (str(again), again.__reduce__()) == (str(error), error.__reduce__())


def test_restored_exception_pickles_like_the_original() -> None:
    """A pool sends it to the main process with pickle."""
    error = Plain("x", 1)
    assert pickle.dumps(kept_error(error)) == pickle.dumps(error)


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("x")


def with_lock() -> Exception:
    error = Plain("x")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "make",
    [
        local,
        with_lock,
        lambda: Slotted(7),
        lambda: Plain((1,)),
        lambda: Plain(object()),
        lambda: Plain("x" * 10_000),
        lambda: Plain(b"x"),
    ],
)
def test_other_exception_is_not_kept(make: Any) -> None:
    assert kept_error(make()) is None


@pytest.mark.parametrize(
    "parts",
    [
        ["os", "system", ["true"], {}],
        ["builtins", "SystemExit", [], {}],
        ["builtins", "int", [1], {}],
        ["builtins", "nothing", [], {}],
        ["nowhere", "Error", [], {}],
        ["builtins", "ValueError", 7, {}],
        ["builtins", "ValueError", [], 7],
        ["builtins", ["ValueError"], [], {}],
        ["builtins", "ValueError"],
        {"a": 1},
        None,
        7,
    ],
)
def test_record_cannot_make_anything_but_an_exception(parts: object) -> None:
    assert ends.end_of(Outcome(states.FAILURE, json.dumps(parts).encode())) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04K\x01.", b"\xff"])
def test_foreign_bytes_count_as_nothing(content: bytes) -> None:
    assert ends.end_of(Outcome(states.SUCCESS, content)) is None
    assert ends.end_of(Outcome(states.FAILURE, content)) is None
