"""A storm for beats alone: one on each of two hosts, a schedule with a tick a second, and what the broker gets."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from redis import Redis

from celery_singleton_lock import clock
from tests import appended
from tests.patience import until
from tests.storm.nemesis import nemeses, raging
from tests.storm.scene import Scene, scene
from tests.storm.ticks import Ticks, count

#: Faults of beats, of the lock server, and of the ways to it. The broker is spared: it is what is looked at.
KINDS = ("beat: ", "lock server: ", "partition: ", "network: ", "moment: ")

#: Seconds between two faults of one nemesis: a beat needs some to start, and to begin to send.
PAUSE = 1.0, 8.0

#: Seconds without faults at the end.
CALM = 20.0


def storm_of_beats(directory: Path, seed: int, minutes: float, scheduler: str) -> Ticks:
    """Run a storm.

    Args:
        directory: for the history and the logs of all processes.
        seed: decides what goes wrong.
        minutes: until the calm.
        scheduler: of both beats, as named in `schedulers.py`.
    """
    with scene(directory, place="server", scheduler=scheduler) as made, Arrivals(made) as arrivals:
        until(lambda: arrivals.count, "a tick arrives")
        _mark(made, "begins")
        angry = nemeses(made, seed, lambda name: name.startswith(KINDS), pause=PAUSE)
        deadline = clock.now() + 60 * minutes
        with raging(angry):
            while clock.now() < deadline and not any(nemesis.error for nemesis in angry):
                clock.sleep(0.1)
            _mark(made, "calm")
        deadline = clock.now() + CALM
        while clock.now() < deadline:
            for host in made.hosts.values():
                made.revive(host)
            clock.sleep(0.5)
        _mark(made, "over")
    return count(appended.read(made.history))


class Arrivals:
    """Takes each message from the broker as it arrives, and notes which process has sent it."""

    def __init__(self, made: Scene) -> None:
        self._made = made
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        #: How many have arrived.
        self.count = 0

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with Redis(port=self._made.broker.port, decode_responses=True) as client:
            while not self._over.is_set():
                if found := client.brpop(["celery"], timeout=1):
                    _mark(self._made, "tick", **_about(json.loads(found[1])["headers"]))
                    self.count += 1


def _about(headers: dict[str, Any]) -> dict[str, Any]:
    """A message's id; its sender, which Celery writes as gen123@host; and when it was due, if it says so."""
    due = (headers.get("singleton_lock") or {}).get("due")
    return {
        "message": headers["id"],
        "pid": int(headers["origin"].partition("@")[0].removeprefix("gen")),
        "due": due and datetime.fromisoformat(due).timestamp(),
    }


def _mark(made: Scene, event: str, **fields: object) -> None:
    appended.append(made.history, {"at": clock.now(), "event": event, **fields})
