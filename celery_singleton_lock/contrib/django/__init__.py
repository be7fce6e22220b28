"""Django: exclusive tasks that are sent on commit; and, in INSTALLED_APPS, settings checks for `manage.py check`."""

from __future__ import annotations

from celery.contrib.django.task import DjangoTask

from celery_singleton_lock.task.singleton_task import SingletonTask

__all__ = ["DjangoSingletonTask"]


class DjangoSingletonTask(SingletonTask, DjangoTask):  # type: ignore[type-arg]
    """A `SingletonTask` that also has `delay_on_commit` and `apply_async_on_commit`.

    Under Django, Celery's own base class provides these, and `base=SingletonTask` replaces it.
    """

    abstract = True
