"""The app of workers whose tasks take their lock when they are sent. Only workers import it: its tasks are shared."""

from __future__ import annotations

from tests.integration.app import app, unregister_refused
from tests.integration.queued_tasks import define

__all__ = ["app"]

define(app)
unregister_refused()
