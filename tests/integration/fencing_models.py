"""Imported when Django is set up."""

from __future__ import annotations

from django.db import models

from celery_singleton_lock.contrib.fencing.django import FencedModel


class Report(FencedModel):
    name = models.TextField(primary_key=True)
    text = models.TextField()

    class Meta:
        app_label = "fencing_app"
        db_table = "report"
