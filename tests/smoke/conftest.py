from __future__ import annotations

from tests.smoke.engine import MISSING

if not MISSING:
    from tests.smoke.containers import *  # noqa: F403 - fixtures, of what is not there otherwise
