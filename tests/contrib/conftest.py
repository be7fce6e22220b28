from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contrib import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Postgres]:
    """A server that tests share; each makes its own tables in it."""
    if postgres.MISSING:
        pytest.skip(postgres.MISSING)
    with postgres.Postgres() as server:
        yield server
