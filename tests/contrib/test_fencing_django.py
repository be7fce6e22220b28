"""Fenced writes with Django's models, on real databases, by several connections at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
import pymysql
import pytest
from django.apps import apps
from django.conf import settings
from django.core.exceptions import FieldDoesNotExist
from django.db import OperationalError, connections, models, transaction
from django.db.migrations.writer import MigrationWriter

from celery_singleton_lock import StaleFence
from tests.contrib.databases import Database
from tests.servers import until

pymysql.version_info = (2, 2, 7, "final", 0)  # Django asks mysqlclient, which PyMySQL replaces, for a version.
pymysql.install_as_MySQLdb()
if not settings.configured:
    settings.configure(USE_TZ=True)
if not apps.ready:
    django.setup()


from celery_singleton_lock.contrib.fencing.django import FencedModel, FencedQuerySet, FenceField  # noqa: E402 - it wants the apps

#: Like real fences: microseconds since the epoch.
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
    """Has its own field and manager, with names of its choice."""

    written_by = FenceField()
    total = models.IntegerField(default=0)

    rows = FencedQuerySet.as_manager()

    class Meta:
        app_label = "fencing"


class Detailed(Report):
    """Has its own table, and its fence in the table of its parent."""

    class Meta:
        app_label = "fencing"


class Unfenced(models.Model):
    rows = FencedQuerySet.as_manager()

    class Meta:
        app_label = "fencing"


@pytest.fixture
def alias(database: Database) -> Iterator[str]:
    """The alias of a database with the tables of the models, and with reports of the tenants 7 and 8."""
    alias = f"fencing_{database.name}"
    # Other code may have configured Django in this process, so this test has its own alias.
    connections.databases[alias] = connections.configure_settings({"default": {}, alias: dict(database.django)})[alias]
    connection = connections[alias]
    if database.name == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode=WAL")  # Otherwise a reader would keep writers from committing.
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


def write(alias: str, fence: int, total: int, **lookup: Any) -> int:
    return Report.objects.using(alias).filter(**(lookup or {"pk": 7})).fenced_update(fence, total=total)


def row(alias: str, pk: int = 7) -> tuple[int, int]:
    return Report.objects.using(alias).values_list("total", "fence").get(pk=pk)


def elsewhere(do: Callable[[], Any]) -> Any:
    """Do it in another thread, which has its own connections."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_and_disconnect, do).result()


def _and_disconnect(do: Callable[[], Any]) -> Any:
    try:
        return do()
    finally:
        connections.close_all()


def test_stale_holder_is_refused(alias: str) -> None:
    assert write(alias, NEW, 2) == 1
    with pytest.raises(StaleFence) as refused:
        write(alias, OLD, 1)
    assert (refused.value.target, refused.value.fence, refused.value.seen) == ("fencing.Report", OLD, NEW)
    assert row(alias) == (2, NEW)


@pytest.mark.parametrize("lookup", [{"pk": 7}, {"tenant__name": "tenant 7"}], ids=["its own table", "a join"])
def test_stale_holder_that_waits_for_the_row_is_refused(database: Database, alias: str, lookup: dict[str, Any]) -> None:
    """It has looked at the row before the later holder commits: the database has to look again."""
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=alias):
            write(alias, NEW, 2)
            late = pool.submit(_and_disconnect, lambda: write(alias, OLD, 1, **lookup))
            until(database.waiting, "the stale holder waits")
        with pytest.raises(StaleFence):
            late.result()
    assert row(alias) == (2, NEW)


def test_stale_holder_in_the_middle_of_a_transaction_is_refused(alias: str) -> None:
    """By the fence, or by SQLite, which sees that the database has changed since the transaction began."""
    refused = OperationalError if "sqlite" in alias else StaleFence
    with pytest.raises(refused), transaction.atomic(using=alias):
        assert row(alias) == (0, 0)
        assert elsewhere(lambda: write(alias, NEW, 2)) == 1
        write(alias, OLD, 1)
    assert row(alias) == (2, NEW)


def test_claimed_row_is_locked_until_the_end_of_the_transaction(alias: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=alias):
            report = Report.objects.using(alias).fenced_get(OLD, pk=7)
            later = pool.submit(_and_disconnect, lambda: write(alias, NEW, 2))
            report.total += 1
            report.save()
            assert not later.done()
        assert later.result() == 1
    assert row(alias) == (2, NEW)


def test_row_cannot_be_claimed_outside_of_a_transaction(alias: str) -> None:
    with pytest.raises(transaction.TransactionManagementError):
        Report.objects.using(alias).fenced_get(NEW, pk=7)
    assert row(alias) == (0, 0)


class TestUpdateOrCreate:
    def test_makes_the_row_with_its_fence(self, alias: str) -> None:
        tenant = Tenant.objects.using(alias).create(pk=9)
        rows = Report.objects.using(alias)
        made, created = rows.fenced_update_or_create(NEW, tenant=tenant, defaults={"total": 2})
        assert (made.total, created) == (2, True)
        assert row(alias, made.pk) == (2, NEW)

    def test_refuses_a_stale_holder_that_would_have_made_the_row(self, database: Database, alias: str) -> None:
        Tenant.objects.using(alias).create(pk=9)

        def make(fence: int, total: int) -> Any:
            return Report.objects.using(alias).fenced_update_or_create(fence, tenant_id=9, defaults={"total": total})

        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic(using=alias):
                made, _ = make(NEW, 2)
                late = pool.submit(_and_disconnect, lambda: make(OLD, 1))
                until(database.waiting, "the stale holder waits")
            with pytest.raises((StaleFence, OperationalError) if "sqlite" in alias else StaleFence):
                late.result()
        assert row(alias, made.pk) == (2, NEW)


def test_field_and_manager_may_have_other_names(alias: str) -> None:
    Named.rows.using(alias).create(pk=1, written_by=OLD)
    assert Named.rows.using(alias).filter(pk=1).fenced_update(NEW, total=2) == 1
    with pytest.raises(StaleFence):
        Named.rows.using(alias).filter(pk=1).fenced_update(OLD, total=1)
    assert Named.rows.using(alias).values_list("total", "written_by").get() == (2, NEW)


@pytest.mark.parametrize("rows", [Unfenced.rows, Detailed.objects], ids=["no fence", "in a parent's table"])
def test_model_without_the_field_gets_an_error(rows: Any) -> None:
    with pytest.raises(FieldDoesNotExist, match="derive it from FencedModel"):
        rows.fenced_update(NEW)


def test_field_can_be_written_into_a_migration() -> None:
    text, imports = MigrationWriter.serialize(FenceField())
    assert text == "celery_singleton_lock.contrib.fencing.django.FenceField(default=0, editable=False)"
    assert imports == {"import celery_singleton_lock.contrib.fencing.django"}
