"""A shop that rebuilds its reports. Importing the project imports the app, so that all of Django uses it."""

from .celery import app as celery_app

__all__ = ["celery_app"]
