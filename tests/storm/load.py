"""What is sent in a storm: hot and cold keys, every policy, retries, delays, chains and chords."""

from __future__ import annotations

import itertools
import json
import random
import threading
import uuid
from typing import Any

from celery import Signature, chain, chord, states
from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from celery_singleton_lock import clock
from tests import appended
from tests.storm import newest
from tests.storm.app import NEWEST, SCOPED
from tests.storm.borrowed import JOINING
from tests.storm.clicks import JOBS
from tests.storm.scene import TTL, Scene

#: Keys that most calls have; and, for packages that lock by all arguments, the seconds that their bodies take.
HOT = {"h0": 0.0, "h1": 0.3, "h2": 1.0, "h3": 1.5 * TTL}

#: Seconds that bodies take; the last is longer than a lease.
LENGTHS = [0.0, 0.0, 0.1, 0.3, 1.0, 1.5 * TTL]

#: The same for a body that a newer message stops: longer than stopping may take.
LONG = 3 * TTL

#: Options of a call of a task without its own policy: `{}` leaves it to the app's settings.
CALLS: list[dict[str, Any]] = [
    {},
    {"on_conflict": "skip"},
    {"on_conflict": "raise"},
    {"on_conflict": "reject"},
    {"on_conflict": "retry"},
    {"wait": 3.0, "on_conflict": "retry"},
    {"wait": 10.0, "on_conflict": "raise"},
]

#: How many messages may be without an end when more are sent.
PENDING = 40


def _forget(result: AsyncResult) -> None:
    """Do nothing: to unsubscribe needs a server, which may be gone, and would make garbage collection wait for it."""


AsyncResult.__del__ = _forget


class Ends:
    """Which messages have an end, from the history as it grows."""

    def __init__(self, scene: Scene) -> None:
        self._file = scene.history.open()
        self._rest = ""
        self.told: set[str] = set()

    def look(self) -> set[str]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            if '"told"' in line:
                found = json.loads(line)
                if found["state"] in states.READY_STATES:
                    self.told.add(found["message"])
        return self.told

    def close(self) -> None:
        self._file.close()


class Load:
    """Sends until it is stopped, past the proxies.

    Attributes:
        pending: messages that were sent and have no end yet; for each, the messages that have to end before it.
    """

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene, self._chance = scene, random.Random(f"{seed} load")
        self._tasks = scene.app.tasks
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._ends = Ends(scene)
        self.pending: dict[str, list[str]] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def look(self) -> set[str]:
        """Messages that must have an end, and have none."""
        told = self._ends.look()
        self.pending = {message: before for message, before in self.pending.items() if message not in told}
        return {message for message, before in self.pending.items() if told.issuperset(before)}

    def close(self) -> None:
        self._ends.close()

    def _run(self) -> None:
        while not self._stopped.wait(0.03):
            if len(self.look()) < PENDING:
                self._send()

    def _send(self) -> None:
        if "patient" not in self._tasks:
            return self._only(self._key())
        ways = [self._single, self._retry, self._pair, self._chain, self._chord]
        ways += [self._joining, self._newest, self._jobs]
        (send,) = self._chance.choices(ways, [12, 3, 2, 2, 1, 2, 3, 2])
        send()

    def _only(self, key: str) -> None:
        """Send a task that every package has."""
        signature = self._tasks["work"].si(key, length_of(key)).set(task_id=_new_id())
        self._send_all(signature, [(signature, [])])

    def _single(self) -> None:
        options = {"headers": {"singleton_lock": self._chance.choice(CALLS)}}
        if self._chance.random() < 0.1:
            options["countdown"] = self._chance.uniform(0.5, 3.0)  # type: ignore[assignment]
        name = self._chance.choice(["work"] * 8 + ["deciding"])
        self._one(self._tasks[name], self._key(), options if name == "work" else {})

    def _retry(self) -> None:
        self._one(self._tasks[self._chance.choice(["retrying", "retaining"])], self._key(), {})

    def _pair(self) -> None:
        if "paired" in self._tasks:  # A Redlock has no such locks.
            self._one(self._tasks["paired"], "p0", {})

    def _chain(self) -> None:
        steps = [self._step() for _ in range(3)]
        self._send_all(chain(steps), [(step, [before.id] if before else []) for before, step in _with_before(steps)])

    def _chord(self) -> None:
        header, body = [self._step() for _ in range(3)], self._step()
        self._send_all(chord(header, body), [*((step, []) for step in header), (body, [step.id for step in header])])

    def _joining(self) -> None:
        self._some(JOINING)

    def _newest(self) -> None:
        if tasks := [name for name in NEWEST.values() if name in self._tasks]:
            self._some(self._chance.choice(tasks))

    def _some(self, task: str) -> None:
        """Send one or more messages for a hot key, which meet each other and other messages there."""
        key = self._chance.choice([*HOT])
        for _ in range(self._chance.randint(1, 3)):
            self._one(self._tasks[task], key, {})

    def _jobs(self) -> None:
        """Send a canvas of jobs that are also sent alone: its parts follow the message that has the lock."""
        jobs = [self._job() for _ in range(2)]
        if self._chance.random() < 0.5:
            steps = [jobs[0], self._step(), jobs[1]]
            self._send_all(chain(steps), [(one, [before.id] if before else []) for before, one in _with_before(steps)])
        else:
            body = self._step()
            parts = [*((job, []) for job in jobs), (body, [job.id for job in jobs])]
            self._send_all(chord(jobs, body), parts)

    def _job(self) -> Signature:
        task, key = self._chance.choice(sorted(SCOPED)), self._chance.choice(sorted(JOBS))
        return self._tasks[task].si(key, JOBS[key]).set(task_id=_new_id())

    def _step(self) -> Signature:
        return self._tasks["patient"].si(self._key(), self._chance.choice([0.0, 0.1, 0.3])).set(task_id=_new_id())

    def _one(self, task: Any, key: str, options: dict[str, Any]) -> None:
        lengths = [*LENGTHS, LONG] if task.name == newest.REPLACE else LENGTHS
        signature = task.si(key, self._chance.choice(lengths)).set(task_id=_new_id(), **options)
        self._send_all(signature, [(signature, [])])

    def _send_all(self, whole: Signature, parts: list[tuple[Signature, list[str]]]) -> None:
        ids = {part.id: before for part, before in parts}
        for part, before in parts:
            call = part.options.get("headers", {}).get("singleton_lock", {})
            policy = call.get("on_conflict", "")
            self._note("sent", part.id, task=part.task, key=part.args[0], after=before, policy=policy)
        try:
            result = whole.apply_async()
            refused = result is None or result.id not in ids
        except (OSError, OperationalError, RedisError):
            # A part of it may have been sent.
            refused = True
        except Exception:
            # Packages that lock when a message is sent refuse it with an exception.
            if "patient" in self._tasks:
                raise
            refused = True
        if refused:
            for message in ids:
                self._note("unsure", message)
        else:
            self.pending |= ids

    def _key(self) -> str:
        """A key, mostly a hot one."""
        return self._chance.choice([*HOT]) if self._chance.random() < 0.7 else f"c{next(self._numbers)}"

    def _note(self, event: str, message: str, **fields: object) -> None:
        line = {"at": clock.now(), "host": "sender", "pid": 0, "event": event, "message": message, **fields}
        appended.append(self._scene.history, line)


def _with_before(steps: list[Signature]) -> list[tuple[Signature | None, Signature]]:
    return list(zip([None, *steps], steps, strict=False))


def length_of(key: str) -> float:
    """Seconds that bodies of the key take, for packages that lock by all arguments."""
    return HOT.get(key, 0.1)


def _new_id() -> str:
    return str(uuid.uuid4())
