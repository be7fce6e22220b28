"""The model for the admin, which has entries only for models."""

from __future__ import annotations

from django.db import models


class ExclusiveLock(models.Model):  # type: ignore[misc]
    """The locks, which are on the lock server: this model has no table."""

    class Meta:
        """No table, and no permissions: all staff may look."""

        managed = False
        default_permissions = ()
        verbose_name = "exclusive lock"
        verbose_name_plural = "exclusive locks"
