"""The shop, whose workers give a lock up as soon as one renewal has no answer."""

from __future__ import annotations

from celery_singleton_lock import trust
from tests.integration.app import app

__all__ = ["app"]

trust.GIVE_UP_BEFORE = trust.LOST_BEFORE = 0.65
trust.STEP_SHARE = 0.01
