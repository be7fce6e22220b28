"""`celery_singleton_lock.web.django` in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class LocksConfig(AppConfig):  # type: ignore[misc]
    """Has an entry in the admin; there is no table."""

    name = "celery_singleton_lock.web.django"
    label = "celery_singleton_lock_web"
    verbose_name = "Celery"
