"""`celery_singleton_lock.contrib.django` in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

from celery_singleton_lock.contrib.django.checks import check_production, check_settings


class SingletonLockConfig(AppConfig):  # type: ignore[misc]
    """Registers the checks of the settings; there are no models."""

    name = "celery_singleton_lock.contrib.django"
    label = "celery_singleton_lock"
    verbose_name = "Celery singleton lock"

    def ready(self) -> None:
        checks.register(check_settings, "celery")
        checks.register(check_production, "celery", deploy=True)
