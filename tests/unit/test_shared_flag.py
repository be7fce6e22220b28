"""A flag that processes share."""

from __future__ import annotations

import os

from celery_singleton_lock.shared_flag import SharedFlag


def test_flag_is_new_once() -> None:
    flag = SharedFlag()
    assert not flag.is_new()
    flag.set()
    flag.set()
    assert [flag.is_new(), flag.is_new()] == [True, False]


def test_forked_processes_share_the_flag() -> None:
    flag = SharedFlag()
    child = os.fork()
    if child == 0:
        flag.set()
        os._exit(0)
    os.waitpid(child, 0)
    assert flag.is_new()


def test_number_wraps_around() -> None:
    flag = SharedFlag()
    flag._shared[:4] = b"\xff" * 4
    assert flag.is_new()
    flag.set()
    assert flag._shared[:4] == b"\0" * 4
    assert flag.is_new()
