"""Fenced writes with Django's models: the fence is a field, and part of the `WHERE` of each `UPDATE`.

Import it in a `models.py`; there is nothing to add to `INSTALLED_APPS`.
"""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.errors import StaleFence

try:
    from django.core.exceptions import FieldDoesNotExist
    from django.db import models, transaction
    from django.db.models.functions import Greatest
except ImportError as error:
    raise ImportError(
        "fencing with Django needs Django 4.2 or newer: pip install 'celery-singleton-lock[fencing-django]'"
    ) from error


class FenceField(models.BigIntegerField):  # type: ignore[misc]  # Django has no types.
    """The highest fencing token with which a row was written, 0 for none. A plain `save()` never lowers it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"default": 0, "editable": False, **kwargs})

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """The value to save, at least the stored one: a later holder may have written since the row was read."""
        value = super().pre_save(model_instance, add)
        return value if add else Greatest(models.F(self.attname), models.Value(value))


class FencedQuerySet(models.QuerySet):  # type: ignore[misc]  # As above.
    """A query set of a model with a `FenceField`; its writes refuse a stale holder."""

    def fenced_update(self, fence: int, **values: Any) -> int:
        """Like `update(**values)`, for rows that no later holder has written: all of them or none.

        It is one `UPDATE … SET …, fence = :fence WHERE … AND fence <= :fence`. Without values it claims the rows:
        nobody else writes them until the transaction around it ends, so whatever else the transaction does is fenced,
        too.

        Args:
            fence: the fencing token of the lock, `self.lock.fence` in a task.
            values: the values of the fields.

        Returns:
            The number of rows that were updated; 0 if there are none, and then nothing is claimed.

        Raises:
            StaleFence: a later holder has written one of the rows.
        """
        name, target = _fence_of(self.model), self.model._meta.label
        check_fence(target, fence)
        self._for_write = True
        rows = self._of_one_table()
        with transaction.atomic(using=self.db):
            updated: int = rows.filter(**{f"{name}__lte": fence}).update(**values, **{name: fence})
            # FOR UPDATE: where transactions read from a snapshot, this reads what is there now, as the update did.
            stale = rows.filter(**{f"{name}__gt": fence}).select_for_update().order_by()
            seen = stale.values_list(name, flat=True).first()
            if seen is not None:
                raise StaleFence(target, fence, seen)
        return updated

    def fenced_get(self, fence: int, **lookup: Any) -> Any:
        """Like `get(**lookup)`. The row is claimed until the transaction around it ends; change it, and save it.

        Args:
            fence: the fencing token of the lock, `self.lock.fence` in a task.
            lookup: as for `get`.

        Raises:
            StaleFence: a later holder has written the row.
            TransactionManagementError: there is no transaction around it (`transaction.atomic()`).
        """
        self._for_write = True
        if not transaction.get_connection(self.db).in_atomic_block:
            raise transaction.TransactionManagementError("fenced_get cannot be used outside of a transaction")
        pk = self.using(self.db).get(**lookup).pk
        row = FencedQuerySet(self.model, using=self.db).filter(pk=pk)
        row.fenced_update(fence)
        return row.get()

    def fenced_update_or_create(self, fence: int, defaults: dict[str, Any] | None = None, **lookup: Any) -> Any:
        """Like `update_or_create`, unless a later holder has written the row.

        Args:
            fence: the fencing token of the lock, `self.lock.fence` in a task.
            defaults: the values of the fields.
            lookup: finds the row, or creates it; it needs a unique constraint.

        Returns:
            The row, and whether it was created.

        Raises:
            StaleFence: a later holder has written the row.
        """
        values = dict(defaults or {})
        check_fence(self.model._meta.label, fence)
        self._for_write = True
        with transaction.atomic(using=self.db):
            row, created = self.get_or_create(defaults={**values, _fence_of(self.model): fence}, **lookup)
            if not created:
                row = self.fenced_get(fence, pk=row.pk)
                for name, value in values.items():
                    setattr(row, name, value)
                row.save(using=self.db)
        return row, created

    def _of_one_table(self) -> Any:
        """The same rows, without joins: in a subquery, the database would compare the fence of an older snapshot."""
        if len(self.query.alias_map) <= 1:
            return self
        return self.model._base_manager.using(self.db).filter(pk__in=self.order_by().values("pk"))


class FencedModel(models.Model):  # type: ignore[misc]  # As above.
    """A base class for models: a field `fence`, and `objects` with the writes of `FencedQuerySet`."""

    fence = FenceField()

    objects = FencedQuerySet.as_manager()

    class Meta:  # noqa: D106 - Django's
        abstract = True


def _fence_of(model: Any) -> str:
    for field in model._meta.concrete_model._meta.local_concrete_fields:
        if isinstance(field, FenceField):
            return str(field.name)
    raise FieldDoesNotExist(f"{model._meta.label} has no FenceField in its own table; derive it from FencedModel")
