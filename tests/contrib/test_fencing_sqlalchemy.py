"""Fenced writes with SQLAlchemy, on real databases, by several connections at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, Table, create_engine, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_singleton_lock import StaleFence
from celery_singleton_lock.contrib.fencing.sqlalchemy import Fenced, fenced_get, fenced_update
from tests.contrib.databases import Database
from tests.servers import until

#: Like real fences: microseconds since the epoch.
OLD, NEW = 1_795_000_000_000_001, 1_795_000_000_000_002


class Base(DeclarativeBase):
    pass


class Report(Fenced, Base):
    __tablename__ = "report"

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int] = mapped_column(default=0)


plain = Table(
    "plain",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("total", Integer),
    Column("fence", BigInteger, nullable=False, server_default="0"),
)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url)
    if database.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")  # Or a reader would keep writers from committing.
    for tables in (Base.metadata, plain.metadata):
        tables.drop_all(engine)
        tables.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Report(id=7), Report(id=8)])
    yield engine
    engine.dispose()


def write(engine: Engine, fence: int, total: int, of: int = 7) -> int:
    with Session(engine) as session, session.begin():
        return fenced_update(session, fence, update(Report).where(Report.id == of).values(total=total))


def row(engine: Engine, of: int = 7) -> tuple[int, int]:
    with Session(engine) as session:
        report = session.get(Report, of)
        assert report is not None
        return report.total, report.fence


def test_stale_holder_is_refused(engine: Engine) -> None:
    assert write(engine, NEW, 2) == 1
    with pytest.raises(StaleFence) as refused:
        write(engine, OLD, 1)
    assert (refused.value.target, refused.value.fence, refused.value.seen) == ("Report", OLD, NEW)
    assert row(engine) == (2, NEW)


def test_stale_holder_that_waits_for_the_row_is_refused(engine: Engine, database: Database) -> None:
    """It has looked at the row before the later holder commits: the database has to look again."""
    with ThreadPoolExecutor(1) as pool, Session(engine) as session:
        with session.begin():
            fenced_update(session, NEW, update(Report).where(Report.id == 7).values(total=2))
            late = pool.submit(write, engine, OLD, 1)
            until(database.waiting, "the stale holder waits")
        with pytest.raises(StaleFence):
            late.result()
    assert row(engine) == (2, NEW)


#: What refuses a holder that has looked before a later one wrote: the fence, or the database itself.
REFUSED: dict[str, dict[Any, type[Exception]]] = {
    "sqlite": {"SERIALIZABLE": OperationalError},
    "postgres": {
        "READ COMMITTED": StaleFence,
        "REPEATABLE READ": OperationalError,
        "SERIALIZABLE": OperationalError,
    },
    "mariadb": {"READ COMMITTED": StaleFence, "REPEATABLE READ": StaleFence},  # SERIALIZABLE: the later one waits.
}


def test_stale_holder_in_the_middle_of_a_transaction_is_refused(engine: Engine, database: Database) -> None:
    for fence, (isolation, refused) in enumerate(REFUSED[database.name].items(), OLD):
        assert write(engine, fence, 0) == 1
        with engine.connect() as late:
            late.execution_options(isolation_level=isolation)
            if database.name == "sqlite":
                late.exec_driver_sql("BEGIN")  # Python's driver does not begin before a select.
            late.execute(select(Report.total).where(Report.id == 7)).one()
            assert write(engine, fence + 1, 2) == 1
            with pytest.raises(refused):
                fenced_update(late, fence, update(Report).where(Report.id == 7).values(total=1))
        assert row(engine) == (2, fence + 1)


def test_later_holder_waits_for_the_holder_that_claimed_the_row(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, Session(engine) as session:
        with session.begin():
            report = fenced_get(session, OLD, Report, 7)
            assert report is not None
            later = pool.submit(write, engine, NEW, 2)
            report.total = 1
            session.flush()
            assert not later.done()
        assert later.result() == 1
    assert row(engine) == (2, NEW)


def test_table_without_a_class_is_fenced_too(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(plain.insert().values(id=7, total=0))
        assert fenced_update(connection, NEW, update(plain).where(plain.c.id == 7).values(total=2)) == 1
    with pytest.raises(StaleFence), engine.begin() as connection:
        fenced_update(connection, OLD, update(plain).where(plain.c.id == 7).values(total=1))
    with engine.connect() as connection:
        assert connection.execute(select(plain.c.total, plain.c.fence)).one() == (2, NEW)
