import os
from pathlib import Path

SECRET_KEY = "only an example"
INSTALLED_APPS = ["django_celery_beat", "celery_singleton_lock.contrib.django", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", Path(__file__).parents[1] / "db.sqlite3"),
        "OPTIONS": {"timeout": 30},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
CELERY_RESULT_BACKEND = os.environ.get("CELERY_RESULT_BACKEND", "redis://localhost:6379/1")

# The locks are in the broker unless CELERY_SINGLETON_LOCK_BACKEND names another server.
CELERY_SINGLETON_LOCK_TTL = 30
CELERY_SINGLETON_LOCK_TRANSPORT_OPTIONS = {"socket_keepalive": True}

# You may start beat on several hosts. Its schedule is in the database, and begins with these entries.
CELERY_BEAT_SCHEDULER = "exclusive"
CELERY_SINGLETON_LOCK_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_BEAT_SCHEDULE = {
    "rebuild": {"task": "shop.tasks.rebuild_report", "schedule": 1.0, "args": [1], "options": {"expires": 10}},
}
