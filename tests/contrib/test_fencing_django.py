"""Fenced writes with Django's models, on real databases, by several connections at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import django
import pytest
from django.apps import apps
from django.conf import settings
from django.core.exceptions import FieldDoesNotExist
from django.db import OperationalError, connections, models, transaction
from django.db.migrations.writer import MigrationWriter

from celery_singleton_lock import StaleFence
from tests.contrib.postgres import Postgres
from tests.servers import until

if not settings.configured:
    settings.configure(USE_TZ=True)
if not apps.ready:
    django.setup()


from celery_singleton_lock.contrib.fencing.django import FencedModel, FencedQuerySet, FenceField

#: As real ones are: microseconds since the epoch.
OLD, NEW = 1_795_000_000_000_001, 1_795_000_000_000_002


class Tenant(models.Model):
    name = models.TextField()

    class Meta:
        app_label = "fencing"


class Report(FencedModel):
    tenant = models.OneToOneField(Tenant, on_delete=models.CASCADE)
    total = models.IntegerField(default=0)

    class Meta:
        app_label = "fencing"


class Named(models.Model):
    """With a field, a manager, and names of its own."""

    written_by = FenceField()
    total = models.IntegerField(default=0)

    rows = FencedQuerySet.as_manager()

    class Meta:
        app_label = "fencing"


class Detailed(Report):
    """With a table of its own, and its fence in the other one."""

    class Meta:
        app_label = "fencing"


class Unfenced(models.Model):
    rows = FencedQuerySet.as_manager()

    class Meta:
        app_label = "fencing"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The alias of a database with the tables of the models, and a report of tenant 7 and one of tenant 8."""
    alias = f"fencing_{request.param}"
    if request.param == "sqlite":
        given: dict[str, Any] = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "database"),
            "OPTIONS": {"timeout": 30},  # Longer than any other transaction of a test.
        }
    else:
        server: Postgres = request.getfixturevalue("postgres_server")
        where = server.address
        given = {"HOST": where["host"], "PORT": where["port"], "USER": where["user"], "NAME": where["dbname"]}
        given["ENGINE"] = "django.db.backends.postgresql"
    # Whoever else has configured Django in this process: the alias is ours.
    connections.databases[alias] = connections.configure_settings({"default": {}, alias: given})[alias]
    connection = connections[alias]
    if request.param == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode=WAL")  # Or a reader would keep writers from committing.
    tables = [Tenant, Report, Named]
    with connection.schema_editor() as editor:
        for table in tables:
            editor.create_model(table)
    for pk in (7, 8):
        Report.objects.using(alias).create(pk=pk, tenant=Tenant.objects.using(alias).create(pk=pk, name=f"tenant {pk}"))
    yield alias
    with connection.schema_editor() as editor:
        for table in reversed(tables):
            editor.delete_model(table)
    connection.close()
    del connections[alias], connections.databases[alias]


def write(database: str, fence: int, total: int, **lookup: Any) -> int:
    return Report.objects.using(database).filter(**(lookup or {"pk": 7})).fenced_update(fence, total=total)


def row(database: str, pk: int = 7) -> tuple[int, int]:
    return Report.objects.using(database).values_list("total", "fence").get(pk=pk)


def elsewhere(do: Callable[[], Any]) -> Any:
    """Do it in another thread, which has connections of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_and_disconnect, do).result()


def _and_disconnect(do: Callable[[], Any]) -> Any:
    try:
        return do()
    finally:
        connections.close_all()


def test_stale_holder_is_refused(database: str) -> None:
    assert write(database, NEW, 2) == 1
    with pytest.raises(StaleFence) as refused:
        write(database, OLD, 1)
    assert (refused.value.target, refused.value.fence, refused.value.seen) == ("fencing.Report", OLD, NEW)
    assert row(database) == (2, NEW)


def test_holder_may_write_often_and_the_next_one_after_it(database: str) -> None:
    for fence, total in ((OLD, 1), (OLD, 2), (NEW, 3)):
        write(database, fence, total)
    assert row(database) == (3, NEW)


def test_row_that_is_not_there_is_no_stale_holder(database: str) -> None:
    assert write(database, OLD, 1, pk=404) == 0


def test_one_stale_row_undoes_all(database: str) -> None:
    write(database, NEW, 2, pk=8)
    with transaction.atomic(using=database), pytest.raises(StaleFence):
        write(database, OLD, 1, pk__gt=0)
    assert (row(database, 7), row(database, 8)) == ((0, 0), (2, NEW))


@pytest.mark.parametrize("lookup", [{"pk": 7}, {"tenant__name": "tenant 7"}], ids=["its own table", "a join"])
def test_stale_holder_that_waits_for_the_row_is_refused(
    database: str, lookup: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """It has looked at the row before the later holder commits: the database has to look again."""
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=database):
            write(database, NEW, 2)
            late = pool.submit(_and_disconnect, lambda: write(database, OLD, 1, **lookup))
            if "postgres" in database:
                until(request.getfixturevalue("postgres_server").waiting, "the stale holder waits")
        with pytest.raises(StaleFence):
            late.result()
    assert row(database) == (2, NEW)


def test_stale_holder_in_the_middle_of_a_transaction_is_refused(database: str) -> None:
    """By the fence, or by SQLite, which sees that the database has changed since the transaction began."""
    refused = OperationalError if "sqlite" in database else StaleFence
    with pytest.raises(refused), transaction.atomic(using=database):
        assert row(database) == (0, 0)
        assert elsewhere(lambda: write(database, NEW, 2)) == 1
        write(database, OLD, 1)
    assert row(database) == (2, NEW)


def test_row_that_is_claimed_is_nobody_elses_until_the_end(database: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=database):
            report = Report.objects.using(database).fenced_get(OLD, pk=7)
            later = pool.submit(_and_disconnect, lambda: write(database, NEW, 2))
            report.total += 1
            report.save()
            assert not later.done()
        assert later.result() == 1
    assert row(database) == (2, NEW)


def test_row_that_a_later_holder_wrote_is_not_claimed(database: str) -> None:
    write(database, NEW, 2)
    with pytest.raises(StaleFence), transaction.atomic(using=database):
        Report.objects.using(database).fenced_get(OLD, pk=7)


def test_row_is_not_claimed_outside_of_a_transaction(database: str) -> None:
    with pytest.raises(transaction.TransactionManagementError):
        Report.objects.using(database).fenced_get(NEW, pk=7)
    assert row(database) == (0, 0)


def test_the_highest_of_many_writers_is_the_last(database: str) -> None:
    fences = random.sample(range(OLD, OLD + 40), 40)

    def try_to_write(fence: int) -> bool:
        try:
            return write(database, fence, fence - OLD) == 1
        except StaleFence:
            return False
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(try_to_write, fences))
    assert row(database) == (39, OLD + 39)
    assert written[fences.index(OLD + 39)]


class TestUpdateOrCreate:
    def test_makes_the_row_with_its_fence(self, database: str) -> None:
        tenant = Tenant.objects.using(database).create(pk=9)
        rows = Report.objects.using(database)
        made, created = rows.fenced_update_or_create(NEW, tenant=tenant, defaults={"total": 2})
        assert (made.total, created) == (2, True)
        assert row(database, made.pk) == (2, NEW)

    def test_changes_the_row_that_is_there(self, database: str) -> None:
        changed, created = Report.objects.using(database).fenced_update_or_create(NEW, pk=7, defaults={"total": 2})
        assert (changed.total, changed.fence, created) == (2, NEW, False)
        assert row(database) == (2, NEW)

    def test_refuses_a_stale_holder(self, database: str) -> None:
        write(database, NEW, 2)
        with pytest.raises(StaleFence):
            Report.objects.using(database).fenced_update_or_create(OLD, pk=7, defaults={"total": 1})
        assert row(database) == (2, NEW)

    def test_refuses_a_stale_holder_that_would_have_made_the_row(
        self, database: str, request: pytest.FixtureRequest
    ) -> None:
        Tenant.objects.using(database).create(pk=9)

        def make(fence: int, total: int) -> Any:
            return Report.objects.using(database).fenced_update_or_create(fence, tenant_id=9, defaults={"total": total})

        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic(using=database):
                made, _ = make(NEW, 2)
                late = pool.submit(_and_disconnect, lambda: make(OLD, 1))
                if "postgres" in database:
                    until(request.getfixturevalue("postgres_server").waiting, "the stale holder waits")
            with pytest.raises((StaleFence, OperationalError) if "sqlite" in database else StaleFence):
                late.result()
        assert row(database, made.pk) == (2, NEW)


def test_plain_save_of_what_was_read_before_does_not_lower_the_fence(database: str) -> None:
    """As by the admin: not refused, but a holder that was stale stays it."""
    read_before = Report.objects.using(database).get(pk=7)
    write(database, NEW, 2)
    read_before.total = 5
    read_before.save()
    assert row(database) == (5, NEW)
    with pytest.raises(StaleFence):
        write(database, OLD, 1)


def test_field_and_manager_may_have_other_names(database: str) -> None:
    Named.rows.using(database).create(pk=1, written_by=OLD)
    assert Named.rows.using(database).filter(pk=1).fenced_update(NEW, total=2) == 1
    with pytest.raises(StaleFence):
        Named.rows.using(database).filter(pk=1).fenced_update(OLD, total=1)
    assert Named.rows.using(database).values_list("total", "written_by").get() == (2, NEW)


@pytest.mark.parametrize("rows", [Unfenced.rows, Detailed.objects], ids=["no fence", "in a parent's table"])
def test_model_without_the_field_is_told_so(rows: Any) -> None:
    with pytest.raises(FieldDoesNotExist, match="derive it from FencedModel"):
        rows.fenced_update(NEW)


def test_execution_without_a_lock_is_refused(database: str) -> None:
    with pytest.raises(StaleFence, match="holds no lock"):
        write(database, 0, 1)


def test_field_can_be_written_into_a_migration() -> None:
    text, imports = MigrationWriter.serialize(FenceField())
    assert text == "celery_singleton_lock.contrib.fencing.django.FenceField(default=0, editable=False)"
    assert imports == {"import celery_singleton_lock.contrib.fencing.django"}
