"""The settings of beat's exclusive scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.options.rules import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatSettings:
    """The app's settings for beat's exclusive scheduler, checked.

    Attributes:
        scheduler: the scheduler that is made exclusive, or its name.
        ttl: seconds after which other beats send what a beat had claimed that died, and after which it is not shown.
        catch_up: seconds after which a missed tick is no longer made up for; None: it always is.
        name: the name of the schedule; beats with the same name and lock server share it.
    """

    scheduler: str | type
    ttl: float
    catch_up: float | None
    name: str

    @classmethod
    def from_app(cls, app: Any) -> BeatSettings:
        """The settings in an app's configuration.

        Raises:
            InvalidOption: a setting is not allowed.
        """
        conf = app.conf
        return cls(
            scheduler=setting(conf, "singleton_lock_beat_scheduler", "celery.beat:PersistentScheduler"),
            ttl=float(setting(conf, "singleton_lock_beat_ttl", 5.0)),
            catch_up=setting(conf, "singleton_lock_beat_catch_up"),
            name=setting(conf, "singleton_lock_beat_name", app.main or "default"),
        )
