"""Somebody's app with the page in it, for `uvicorn tests.web.mounted:app`."""

from __future__ import annotations

import os

from celery import Celery
from starlette.applications import Starlette
from starlette.routing import Mount

from celery_singleton_lock.web import app_of

app = Starlette(routes=[Mount("/locks", app_of(Celery("shop", broker=os.environ["REDIS"])))])
