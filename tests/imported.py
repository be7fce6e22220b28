"""What the programs of tests import before they are forked, see `tests/programs.py`."""

from __future__ import annotations

import gc
import pkgutil
import platform
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata

gc.disable()  # Hardly anything becomes garbage.

# Each worker reads the metadata of all installed packages several times. From here on it is cached.
metadata.entry_points = cache(metadata.entry_points)
metadata.version = cache(metadata.version)

import celery_singleton_lock  # noqa: E402

#: What `celery worker` and `celery beat` import one by one, besides our own modules.
_OTHERS = (
    "billiard.heap",
    "billiard.popen_fork",
    "billiard.sharedctypes",
    "billiard.synchronize",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.fixups.django",
    "celery.loaders.app",
    "celery.worker.autoscale",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "django.core.management",
    "django.db.models",
    "encodings.idna",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
)

for _, name, _ in pkgutil.walk_packages(celery_singleton_lock.__path__, f"{celery_singleton_lock.__name__}."):
    # Each needs a library, and some need it to be set up.
    if not {"contrib", "web"} & {*name.split(".")}:
        import_module(name)
for name in _OTHERS:
    with suppress(ImportError):  # Not in every version.
        import_module(name)
for group in (
    *("celery.commands", "celery.worker", "celery.consumer", "celery.result_backends"),
    "celery_singleton_lock.observers",
):
    metadata.entry_points(group=group)
metadata.version("redis")
platform.platform()  # Its first call runs another program.
gc.enable()
