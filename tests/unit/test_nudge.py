"""The pipe that wakes a thread."""

from __future__ import annotations

import gc
import os
import select
from contextlib import suppress

from celery_singleton_lock.worker.nudge import Nudge


def is_given(nudge: Nudge) -> bool:
    return bool(select.select([nudge.descriptor], [], [], 0.0)[0])


def test_nudge_remains_until_it_is_taken() -> None:
    nudge = Nudge()
    assert not is_given(nudge)
    nudge.give()
    nudge.give()
    assert is_given(nudge)
    nudge.take()
    assert not is_given(nudge)
    nudge.take()


def test_full_pipe_blocks_nobody() -> None:
    nudge = Nudge()
    for _ in range(70_000):
        nudge.give()
    nudge.take()


def test_unused_nudge_is_closed() -> None:
    nudge = Nudge()
    reader, writer = os.dup(nudge.descriptor), os.dup(nudge.writer)
    descriptors, pipe = (nudge.descriptor, nudge.writer), os.fstat(reader).st_ino
    del nudge
    gc.collect()
    for descriptor in descriptors:
        with suppress(OSError):  # A thread that an earlier test left may have reused the number.
            assert os.fstat(descriptor).st_ino != pipe
    os.close(reader)
    os.close(writer)
