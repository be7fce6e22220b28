"""The pytest plugin, loaded in every run of pytest where the package is installed.

It is outside of the package, because any import from the package imports Celery, too. So a project that does not use
the fixture pays nothing, and nothing that coverage should measure is imported before it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_singleton_lock.testing import RecordedLocks


@pytest.fixture
def singleton_locks() -> Iterator[RecordedLocks]:
    """The locks of exclusive Celery tasks in memory, for one test: no server, and everything is recorded."""
    from celery_singleton_lock.testing import memory_locks

    with memory_locks() as locks:
        yield locks
