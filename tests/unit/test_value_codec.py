"""A value that is kept comes back as the same, or is not kept; and keeping a value cannot harm it."""

from __future__ import annotations

import collections
import enum
import json
import os
import pickle
import sys
import threading
import time as times
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

import celery.exceptions
import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import LockConflict, LockLost, ResultLost
from celery_singleton_lock.task import value_codec

LIMIT = 4096

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.just(timezone.utc))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["~tuple", "~dict", "~", "__type__", "__value__", "a"]), inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


def exactly(value: Any) -> Any:
    """A form in which 1, 1.0 and True, or a list and a tuple, are different."""
    if isinstance(value, dict):
        return "dict", [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(exactly(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [exactly(item) for item in value]
    return type(value).__name__, repr(value)


@given(VALUES)
def test_value_comes_back_exactly_or_is_not_kept(value: object) -> None:
    content = value_codec.dumps(value, 10**6)
    if content is not None:
        assert exactly(value_codec.loads(content)) == exactly(value)
    small = value_codec.dumps(value, 50)
    assert small is None or (small == content and len(small) <= 50)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 3.5, 10**10, 2**200, float("inf"), -0.0, "", "text", "é😀\x00\n", b"", b"\xff\x00"),
        *([], {}, (), set(), [1, [2, (3,)]], {"a": {"b": None}}, {1: 2}, {"1": 1, 1: 2}, {(1, 2): 3}, {None: 1}),
        *({"~dict": []}, {"~": 1}, {"__type__": "bytes", "__value__": "x"}, {"~tuple": {"~tuple": [1]}}),
        *(datetime(2026, 11, 22, 3, 4, 5, 6), datetime(2026, 1, 1, tzinfo=timezone.utc), date(2026, 1, 1), time(1, 2)),
        *(timedelta(-1, 2, 3), Decimal("1.10"), Decimal("Infinity"), UUID(int=7), frozenset({1}), {1, 2}),
    ],
    ids=repr,
)
def test_plain_value_is_kept(value: object) -> None:
    content = value_codec.dumps(value, LIMIT)
    assert content is not None
    assert exactly(value_codec.loads(content)) == exactly(value)


def test_nan_is_kept() -> None:
    value = value_codec.loads(value_codec.dumps(float("nan"), LIMIT) or b"")
    assert value != value


class Named(NamedTuple):
    a: int


class Colour(str, enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        *(Named(1), Colour.RED, Text("x"), collections.OrderedDict(a=1), collections.Counter("a"), object(), len, int),
        *({"a": object()}, [Text()], {Text("a"): 1}, bytearray(b"x"), memoryview(b"x"), 1j, range(2), iter([1]), ...),
        *("\ud800", "\ud83d\ude00", ValueError("returned"), datetime(2026, 1, 1, fold=1)),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1), "here")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_that_would_come_back_changed_is_not_kept(value: object) -> None:
    assert value_codec.dumps(value, LIMIT) is None


class Hostile:
    """Fails the test whatever is called on it."""

    ran: list[str] = []

    def __getattribute__(self, name: str) -> NoReturn:
        Hostile.ran.append(name)
        raise KeyboardInterrupt

    def _fail(self, *_: object) -> NoReturn:
        Hostile.ran.append("special")
        raise SystemExit

    __json__ = __reduce__ = __reduce_ex__ = __getstate__ = __iter__ = __len__ = __bytes__ = _fail
    __str__ = __repr__ = __eq__ = __hash__ = __bool__ = __index__ = __float__ = _fail


class HostileList(list[Any]):
    __iter__ = __len__ = __reduce_ex__ = __getitem__ = Hostile._fail  # type: ignore[assignment]


class HostileDict(dict[Any, Any]):
    __iter__ = items = keys = __len__ = __reduce_ex__ = Hostile._fail  # type: ignore[assignment]


class HostileText(str):
    __len__ = encode = __reduce_ex__ = __str__ = Hostile._fail  # type: ignore[assignment]


@pytest.mark.parametrize("make", [Hostile, HostileList, HostileDict, HostileText])
def test_no_user_code_runs(make: Any) -> None:
    value = make()
    for whole in (value, [value], {"a": value}, (1, {2: [value]})):
        assert value_codec.dumps(whole, LIMIT) is None
    error = ValueError(value)
    assert value_codec.dumps_error(error, LIMIT) is None
    assert Hostile.ran == []


def test_value_is_not_changed() -> None:
    """An overriding backend (Elasticsearch's) changes a dictionary that contains a result."""
    inner = [1]
    value = {"result": inner, "traceback": "x"}
    assert value_codec.loads(value_codec.dumps(value, LIMIT) or b"") == value
    assert value == {"result": [1], "traceback": "x"}
    assert value["result"] is inner


@pytest.mark.parametrize(
    "make",
    [
        lambda: "x" * 50_000_000,
        lambda: b"x" * 50_000_000,
        lambda: [None] * 5_000_000,
        lambda: ["x" * 1000] * 1_000_000,
        lambda: dict.fromkeys(range(1_000_000)),
        lambda: {"x" * 10_000_000: 1},
        lambda: 1 << 100_000_000,
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
        content = value_codec.dumps(value, LIMIT)
    finally:
        sys.settrace(before)
    assert content is None
    assert lines < 200_000


def test_shared_parts_do_not_multiply_the_work() -> None:
    value: Any = [1]
    for _ in range(25):
        value = [value, value]
    assert value_codec.dumps(value, LIMIT) is None


def test_value_that_contains_itself_is_not_kept() -> None:
    around: list[Any] = []
    around.append(around)
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    assert value_codec.dumps(around, 10**9) is None
    assert value_codec.dumps(deep, 10**9) is None
    while deep is not None:  # Step by step: the interpreter would free it in one deep recursion.
        deep = deep[0]


def test_value_that_another_thread_changes_never_raises() -> None:
    value = {number: number for number in range(200)}
    stopped = threading.Event()

    def change() -> None:
        while not stopped.is_set():
            value[1000] = 1
            value.pop(1000)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        deadline = times.monotonic() + 0.2
        while times.monotonic() < deadline:
            content = value_codec.dumps(value, LIMIT)
            assert content is None or {**value_codec.loads(content), 1000: 1} == {**value, 1000: 1}
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"1:", b"1:{", b"\x80\x04K\x01.", b'1:{"~eval": "1"}', b'1:{"~bytes": 1}', b"2:null", b"1:\xff"],
)
def test_foreign_bytes_are_an_error(content: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever
        value_codec.loads(content)
    with pytest.raises(Exception):  # noqa: B017, PT011
        value_codec.loads_error(content)


class Plain(Exception):
    pass


class Coded(Exception):
    """Its constructor takes another argument than it passes on: calling it with `args` makes a different exception."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Keyed(Exception):
    """Cannot be made from its `args` at all, nor be unpickled."""

    def __init__(self, *, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.reason = reason


class Slotted(Exception):
    __slots__ = ("code",)


class Reducing(Exception):
    def __reduce__(self) -> NoReturn:
        raise AssertionError("it is not asked")

    __reduce_ex__ = __getstate__ = __setstate__ = __reduce__  # type: ignore[assignment]


class Around:
    class Inner(ValueError):
        pass


def raised(body: Any) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011 - any
        body()
    return info.value


def noted() -> Exception:
    error = Plain("x")
    error.__dict__["__notes__"] = ["on a Monday"]
    return error


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: ValueError(), lambda: ValueError("x", 1, None, (2,)), lambda: Plain("x"), lambda: Coded(7)),
        *(lambda: Keyed(reason="x", code=1), lambda: Around.Inner("x"), noted, lambda: Reducing("x", 2)),
        *(lambda: raised(lambda: {}["k"]), lambda: raised(lambda: 1 / 0), lambda: raised(lambda: os.stat("/nowhere"))),
        *(lambda: raised(lambda: b"\xff".decode()), lambda: raised(lambda: None.x), lambda: raised(lambda: int("x"))),
        *(lambda: raised(lambda: __import__("nowhere")), lambda: raised(lambda: json.loads("{")), StopIteration),
        *(
            lambda: TimeLimitExceeded(5),
            lambda: WorkerLostError("x", 9),
            SoftTimeLimitExceeded,
            lambda: ChordError("x"),
        ),
        *(lambda: LockConflict("k", "t", 1.0), lambda: LockLost("k", "r"), lambda: ResultLost("t", "i", 1)),
        lambda: celery.exceptions.MaxRetriesExceededError("x"),
    ],
)
def test_exception_comes_back_as_it_was(make: Any) -> None:
    error = make()
    content = value_codec.dumps_error(error, LIMIT)
    assert content is not None
    again = value_codec.loads_error(content)
    assert again is not error
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)
    assert {**vars(again)} == {**vars(error)}


@pytest.mark.parametrize("name", ["errno", "strerror", "filename"])
def test_attributes_that_python_keeps_itself_come_back(name: str) -> None:
    error = raised(lambda: os.stat("/nowhere"))
    again = value_codec.loads_error(value_codec.dumps_error(error, LIMIT) or b"")
    assert getattr(again, name) == getattr(error, name)


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("x")


def hidden() -> Exception:
    """An exception whose class has the name of another."""
    return type("Plain", (Exception,), {"__module__": __name__})("x")


def with_lock() -> Exception:
    error = Plain("x")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "make",
    [
        *(local, hidden, with_lock, lambda: Slotted("x"), lambda: Plain(object()), lambda: Plain("x" * 10_000)),
        *(lambda: Plain(Plain("inner")), lambda: Plain(Text("x"))),
    ],
)
def test_exception_that_would_come_back_changed_is_not_kept(make: Any) -> None:
    assert value_codec.dumps_error(make(), LIMIT) is None


@pytest.mark.parametrize(
    "parts",
    [
        ("os", "system", ("true",), None),
        ("builtins", "SystemExit", (), None),
        ("builtins", "int", (1,), None),
        ("builtins", "nothing", (), None),
        ("nowhere", "Error", (), None),
        ("builtins", "ValueError", 7, None),
        ("builtins", "ValueError", (), {"__class__": 1}),
        ("builtins", ["ValueError"], (), None),
    ],
)
def test_record_cannot_make_anything_but_an_exception(parts: object) -> None:
    content = value_codec.dumps(parts, LIMIT)
    assert content is not None
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever
        value_codec.loads_error(content)


def test_restored_exception_pickles_like_the_original() -> None:
    """A pool sends it to the main process with pickle."""
    error = Plain("x", 1)
    again = value_codec.loads_error(value_codec.dumps_error(error, LIMIT) or b"")
    assert pickle.dumps(again) == pickle.dumps(error)
