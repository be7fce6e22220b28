"""The settings of beat's exclusive scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from celery_singleton_lock.options.rules import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatSettings:
    """The app's settings for beat's exclusive scheduler, checked.

    Attributes:
        scheduler: the scheduler that is made exclusive, or its name.
        mode: "leader": one beat sends, the others are on standby; "shared": each sends what no other has claimed.
        ttl: seconds after which another beat takes over from a beat that died.
        catch_up: seconds after which a missed tick is no longer made up for; None: it always is.
        name: the name of the schedule; beats with the same name and lock server share it.
    """

    scheduler: str | type
    mode: Literal["leader", "shared"]
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
            mode=setting(conf, "singleton_lock_beat_mode", "leader"),
            ttl=float(setting(conf, "singleton_lock_beat_ttl", 10.0)),
            catch_up=setting(conf, "singleton_lock_beat_catch_up"),
            name=setting(conf, "singleton_lock_beat_name", app.main or "default"),
        )
