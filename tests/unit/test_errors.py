from __future__ import annotations

import json
import math
import pickle

import pytest
from celery.backends.base import Backend
from celery.contrib.testing.app import TestApp

from celery_singleton_lock import (
    InvalidKey,
    InvalidOption,
    LockConflict,
    LockLost,
    LockUnavailable,
    SingletonLockError,
    StaleFence,
)
from celery_singleton_lock.lock import NotAcquired, NotHeld, NoTimeout, NotOwned, Unavailable

ERRORS = [
    InvalidKey("no stable form"),
    InvalidOption("not allowed"),
    LockConflict("k", "task-1", 2.5),
    LockConflict("k"),
    LockConflict("k", "task-1", 2.5, label="tenant=7"),
    LockConflict("k", None, math.inf),
    LockLost("k", "taken over"),
    LockLost("k", "taken over", label="tenant=7"),
    LockUnavailable("redis://localhost", "no answer"),
    StaleFence("row 7", 5, 9),
    StaleFence("row 7", 0),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_pickle(error: SingletonLockError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_a_json_result_backend(error: SingletonLockError) -> None:
    backend = Backend(TestApp(set_as_current=False), serializer="json")
    stored = json.loads(json.dumps(backend.prepare_exception(error), allow_nan=False))
    copy = backend.exception_to_python(stored)
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_conflict_names_holder_and_remaining_time() -> None:
    text = str(LockConflict("k", "task-1", 2.5))
    assert "task-1" in text
    assert "2.5 s" in text


def test_conflict_with_a_lock_that_never_expires_says_so() -> None:
    """A stranger's key without a time to live, or a key that lost it."""
    error = LockConflict("k", None, math.inf)
    assert error.remaining == math.inf
    assert str(error) == "k is held by something that this package did not write, and never expires"
    assert pickle.loads(pickle.dumps(error)).remaining == math.inf


def test_lost_lock_is_named_with_its_label() -> None:
    lost = LockLost("k", "taken over", label="tenant=7")
    assert str(lost) == str(pickle.loads(pickle.dumps(lost))) == "k (tenant=7): lock lost while running: taken over"


def test_errors_share_only_the_base_class() -> None:
    for error in ERRORS:
        assert isinstance(error, SingletonLockError)
    assert not issubclass(LockLost, LockConflict)
    assert not issubclass(LockUnavailable, LockConflict)


@pytest.mark.parametrize(
    "error", [NotHeld("x"), NotOwned("k", "r"), NoTimeout("x"), NotAcquired("k"), Unavailable("s", "r")], ids=repr
)
def test_errors_that_are_also_errors_of_redis_py_can_be_shown(error: SingletonLockError) -> None:
    assert type(error).__name__ in repr(error)
    assert str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
