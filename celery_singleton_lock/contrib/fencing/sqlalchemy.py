"""Fenced writes with SQLAlchemy 2, Core and ORM: the fence is a column, and part of the `WHERE` of each `UPDATE`."""

from __future__ import annotations

from typing import Any, TypeVar

from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.errors import StaleFence

try:
    from sqlalchemy import BigInteger, Connection, Update, inspect, select, update
    from sqlalchemy.orm import Mapped, Session, mapped_column
except ImportError as error:
    raise ImportError(
        "fencing with SQLAlchemy needs SQLAlchemy 2: pip install 'celery-singleton-lock[fencing-sqlalchemy]'"
    ) from error

Row = TypeVar("Row")


class Fenced:
    """A mixin for mapped classes: the highest fencing token with which a row was written, 0 for none.

    For a `Table`: `Column("fence", BigInteger, nullable=False, server_default="0")`.
    """

    fence: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


def fenced_update(session: Session | Connection, fence: int, statement: Update) -> int:
    """Update rows that no later holder has written: `UPDATE … SET …, fence = :fence WHERE … AND fence <= :fence`.

    It runs in the transaction of the session. Without values it claims the rows: nobody else writes them until the
    transaction ends, so whatever else the transaction does is fenced, too.

    Args:
        session: a session or a connection.
        fence: the fencing token of the lock, `self.lock.fence` in a task.
        statement: an `update(...)` of a table, or a mapped class, with a column `fence`.

    Returns:
        The number of rows that were updated; 0 if there are none, and then nothing is claimed.

    Raises:
        StaleFence: a later holder has written one of the rows. Roll the transaction back: other rows may be updated.
    """
    described = statement.entity_description
    target = described["name"]
    check_fence(target, fence)
    column = described["entity"].fence if "entity" in described else described["table"].c.fence
    fenced = statement.values({column: fence}).where(column <= fence)
    updated: int = session.execute(fenced).rowcount  # type: ignore[attr-defined]  # CursorResult for DML.
    # FOR UPDATE: where transactions read from a snapshot, this reads what is there now, as the update did.
    same = [] if statement.whereclause is None else [statement.whereclause]
    stale = select(column).where(*same, column > fence).with_for_update()
    seen = session.execute(stale).scalars().first()
    if seen is not None:
        raise StaleFence(target, fence, seen)
    return updated


def fenced_get(session: Session, fence: int, entity: type[Row], key: Any) -> Row | None:
    """Like `session.get(entity, key)`. The row is claimed until the transaction ends; change it like any other row.

    Args:
        session: a session in a transaction.
        fence: the fencing token of the lock, `self.lock.fence` in a task.
        entity: a mapped class with a column `fence`.
        key: the primary key; a tuple if it has several columns.

    Returns:
        The row as it is now in the database, or None if there is none.

    Raises:
        StaleFence: a later holder has written the row.
    """
    columns = inspect(entity).primary_key
    values = key if isinstance(key, tuple) else (key,)
    is_row = [column == value for column, value in zip(columns, values, strict=True)]
    claimed = fenced_update(session, fence, update(entity).where(*is_row))
    return session.get(entity, key, populate_existing=True) if claimed else None
