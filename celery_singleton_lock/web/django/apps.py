"""`celery_singleton_lock.web.django` in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class LocksConfig(AppConfig):  # type: ignore[misc]
    """An entry in the admin, without a table."""

    name = "celery_singleton_lock.web.django"
    label = "celery_singleton_lock_web"
    verbose_name = "Celery"
    default_auto_field = "django.db.models.BigAutoField"  # Of no table; Django asks for it before version 6.
