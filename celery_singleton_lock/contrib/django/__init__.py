"""Django: exclusive tasks that are sent on commit; in INSTALLED_APPS, checks of the settings by `manage.py check`."""

from __future__ import annotations

from celery.contrib.django.task import DjangoTask

from celery_singleton_lock.task.singleton_task import SingletonTask

__all__ = ["DjangoSingletonTask"]


class DjangoSingletonTask(SingletonTask, DjangoTask):  # type: ignore[type-arg]
    """A `SingletonTask` that has `delay_on_commit` and `apply_async_on_commit` as well.

    Under Django Celery gives those to the tasks of an app by their base class, which `base=SingletonTask` replaces.
    """

    abstract = True
