"""The app of workers whose processes are started as the setting `test_start_method` says; macOS has them spawned by
default, without any setting of Celery's.
"""

from __future__ import annotations

from billiard import set_start_method

from tests.integration.app import app

__all__ = ["app"]

set_start_method(app.conf.test_start_method, force=True)
