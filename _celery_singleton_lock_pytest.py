"""The pytest plugin, loaded in every run of pytest where the package is installed.

It stands outside of the package, since to import anything from that imports Celery as well: a project that does not use
the fixture does not pay for it, and what coverage measures is not imported before it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_singleton_lock.testing import RecordedLocks

# What a test of a store inherits says what it has found.
pytest.register_assert_rewrite("celery_singleton_lock.testing.store_contract")


@pytest.fixture
def singleton_locks() -> Iterator[RecordedLocks]:
    """Locks of exclusive Celery tasks in memory, for one test: no server, and everything that happens is recorded."""
    from celery_singleton_lock.testing import memory_locks

    with memory_locks() as locks:
        yield locks
