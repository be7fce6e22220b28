"""What the doctor finds; run only once in a while, because it asks servers and workers, and tries a lock."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.diagnosis.doctor import diagnose
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.web.pages import View

#: Seconds for which a diagnosis is reused.
EVERY = 30.0

#: The seconds that workers have to answer.
TIMEOUT = 1.0


class Examination:
    """Examines one app.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._mutex = Mutex()
        self._examined_at = float("-inf")
        self._view: View | None = None

    def view(self) -> View:
        """The page."""
        with self._mutex.lock:
            if self._view is None or clock.now() - self._examined_at >= EVERY:
                self._view = self._examined()
                self._examined_at = clock.now()
            return self._view

    def _examined(self) -> View:
        context: dict[str, Any] = {"findings": [], "seen": [], "error": "", "looked_at": clock.wall(), "every": EVERY}
        try:
            self._app.loader.import_default_modules()
            diagnosis = diagnose(self._app, timeout=TIMEOUT)
            context["findings"] = diagnosis.findings
            context["seen"] = diagnosis.seen
        except SingletonLockError as error:
            context["error"] = cleaned.line(error)
        return View("doctor.html", "Doctor", context=context)
