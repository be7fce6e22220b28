"""Set up by the environment that a test gives it."""

from __future__ import annotations

import json
import os

SECRET_KEY = "of no importance"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["TEST_DATABASE"],
        # IMMEDIATE: reading first and writing then is refused at once if another has begun to write.
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}
USE_TZ = True
TIME_ZONE = "Europe/Berlin"

CELERY_TIMEZONE = TIME_ZONE
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_EXPIRES = None
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_SINGLETON_LOCK_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"

# What differs from test to test, by the same names.
globals().update(json.loads(os.environ.get("TEST_SETTINGS", "{}")))
