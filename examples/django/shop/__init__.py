"""A shop that rebuilds its reports. The app is imported with the project, so that all of Django knows it."""

from .celery import app as celery_app

__all__ = ["celery_app"]
