"""Fixtures: the app for the worker in a thread. (`singleton_locks` comes with the package.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from celery.contrib.testing import tasks as _ping  # noqa: F401 - `celery_worker` sends this first

from examples.testing.tasks import app

pytest_plugins = ["celery.contrib.pytest"]

# For the worker in a thread. This must come before anything is sent, because an app keeps its connections.
app.conf.update(broker_url="memory://", result_backend="cache+memory://")
app.conf.broker_transport_options = {"polling_interval": 0.01}  # By default the broker is asked once a second.


@pytest.fixture
def eager() -> Iterator[None]:
    """`delay` runs the task at once, in this process."""
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield
    app.conf.update(task_always_eager=False, task_eager_propagates=False)


@pytest.fixture
def celery_app() -> Celery:
    """The app that Celery's fixture `celery_worker` runs."""
    return app
