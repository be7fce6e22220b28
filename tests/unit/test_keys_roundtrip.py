"""Producer and worker agree: arguments pass through a real kombu message, and give the same key on both sides."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import serialization

from tests.unit.keyed import lock_of, task_of

FAST = settings(deadline=None, max_examples=200)

serialization.enable_insecure_serializers(["pickle", "yaml"])

zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-8))])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
    | st.binary()
    | st.datetimes(timezones=zones)
    | st.dates()
    | st.times()
)
basic = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text("ab{}:,%1")


# Named: Hypothesis reads the source of a lambda, which Python 3.11 cannot do while another thread compiles.
def in_sequences(inner: Any) -> Any:
    return st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)


def in_basic(inner: Any) -> Any:
    return in_sequences(inner) | st.dictionaries(st.text("ab1"), inner, max_size=4)


def in_json(inner: Any) -> Any:
    names = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    return (
        in_sequences(inner)
        | st.dictionaries(names, inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=4)
    )


def in_pickle(inner: Any) -> Any:
    return st.lists(inner, max_size=3) | st.frozensets(st.integers())


json_values = st.recursive(scalars, in_json, max_leaves=12)
basic_values = st.recursive(basic, in_basic, max_leaves=12)
pickled_values = st.recursive(scalars, in_pickle, max_leaves=8)

TASK = task_of(lambda a, b=(1, 2): None)


def received(body: Any, serializer: str) -> Any:
    """The body as the worker gets it."""
    content_type, encoding, data = serialization.dumps(body, serializer=serializer)
    return serialization.loads(data, content_type, encoding, accept=[content_type])


def same(one: Any, other: Any) -> bool:
    """Whether they are equal in value and type, as far as a message shows: the oracle for "different arguments"."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = ({str(name): value for name, value in each.items()} for each in (one, other))
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isnan(one) == math.isnan(other) and (math.isnan(one) or repr(one) == repr(other))
    if isinstance(one, (datetime, time)):
        return one.isoformat() == other.isoformat()
    if isinstance(one, Decimal):
        return str(one) == str(other)
    return bool(one == other)


def assert_agree(args: tuple[Any, ...], kwargs: dict[str, Any], serializer: str) -> None:
    their_args, their_kwargs = received((args, kwargs), serializer)
    assert lock_of(TASK, their_args, their_kwargs).key == lock_of(TASK, args, kwargs).key


@FAST
@given(json_values, json_values)
def test_keys_agree_after_json(a: Any, b: Any) -> None:
    assert_agree((a,), {"b": b}, "json")


@FAST
@given(pickled_values)
def test_keys_agree_after_pickle(a: Any) -> None:
    assert_agree((a,), {}, "pickle")


@pytest.mark.parametrize("serializer", ["yaml", "msgpack"])
def test_keys_agree_after_other_serializers(serializer: str) -> None:
    @FAST
    @given(basic_values)
    def agree(a: Any) -> None:
        assert_agree((a,), {}, serializer)

    agree()


@FAST
@given(json_values, json_values)
def test_different_arguments_never_share_a_key(a: Any, b: Any) -> None:
    a, b = received([a, b], "json")
    assert (lock_of(TASK, (a,), {}).key == lock_of(TASK, (b,), {}).key) == same(a, b)


TEMPLATES = [task_of(lambda x, y: None, each) for each in ("{x}:{y}", "{x}%{y}", "a{x}-{y}b", "{x}3A{y}")]


@FAST
@given(*(st.text("ab:%-{};3A", max_size=6) for _ in range(4)))
def test_values_never_forge_a_template(a: str, b: str, c: str, d: str) -> None:
    for task in TEMPLATES:
        one, other = lock_of(task, (a, b), {}).key, lock_of(task, (c, d), {}).key
        assert (one == other) == ((a, b) == (c, d))


def test_keys_agree_for_each_type() -> None:
    """One value of each type that the property tests draw, so that a failure names the type."""
    for value in (
        [(1, 2), (3,)],
        {1: {2: [3]}},
        datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 1, 1),
        date(2026, 1, 1),
        time(12, 30),
        Decimal("1.10"),
        UUID(int=5),
        b"\x00\xff",
        2**100,
        float("inf"),
        "ä☃",
    ):
        assert_agree((value,), {}, "json")
