from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contrib.databases import Database, MariaDB, Postgres, Server, Sqlite


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server that the tests share; each makes its own tables in it."""
    yield from _shared(Postgres)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Server]:
    """Like `postgres`."""
    yield from _shared(MariaDB)


def _shared(kind: type[Server]) -> Iterator[Server]:
    if missing := kind.missing():
        pytest.skip(missing)
    with kind() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Each kind of database."""
    if request.param == "sqlite":
        return Sqlite(tmp_path / "database")
    server: Server = request.getfixturevalue(request.param)
    return server
