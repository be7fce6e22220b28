"""Real `celery beat` processes, and what they have sent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from celery_singleton_lock import clock
from tests.integration.conftest import until
from tests.integration.workers import LIMIT, Process
from tests.redis_server import RedisServer

APP = "tests.integration.beat_app"


class Beat(Process):
    """A `celery beat`, or a worker with one."""

    def __init__(
        self, name: str, command: Sequence[str], *, directory: Path, environment: Mapping[str, str], app: str = APP
    ) -> None:
        super().__init__(name, app, command, directory=directory, environment=environment)

    def wait_for(self, *texts: str, times: int = 1) -> Beat:
        """Wait until the log contains one of the texts that many times."""
        deadline = clock.now() + LIMIT
        while sum(self.log.count(text) for text in texts) < times:
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.log[-3000:]}"
            assert clock.now() < deadline, f"{self.name} did not say {texts}:\n{self.log[-3000:]}"
            clock.sleep(0.01)
        return self


@dataclass(frozen=True)
class Message:
    """What was sent for a tick."""

    entry: str
    task_id: str
    due: float


@dataclass
class Studio:
    """A broker, a lock server, and beats."""

    broker: RedisServer
    locks: RedisServer
    directory: Path
    exits: ExitStack
    schedule: dict[str, Any] = field(default_factory=lambda: {"half": 0.5})
    conf: dict[str, Any] = field(default_factory=dict)
    beats: list[Beat] = field(default_factory=list)

    def start(self, *names: str, command: tuple[str, ...] = ()) -> list[Beat]:
        """Start beats with these names, one by one."""
        started = []
        for name in names:
            own = command or ("beat", "-S", "exclusive", "-s", str(self.directory / f"{name}.schedule"))
            beat = Beat(name, list(own), directory=self.directory, environment=self.environment())
            self.exits.callback(beat.kill)
            self.beats.append(beat)
            started.append(beat.wait_for("beat: Starting"))
        return started

    def seen(self) -> list[int]:
        """The pids of the beats that other programs see."""
        with self.locks.client(2) as client:
            values = [client.get(key) or "" for key in client.keys("*{beat:*:run")]
        pids = [beat.process.pid for beat in self.beats]
        return [pid for pid in pids if any(f",{pid}," in value for value in values)]

    def age(self, seconds: float, *entries: str) -> None:
        """Set back the last runs of some or all entries."""
        with self.locks.client(2) as client:
            (key,) = client.keys("*:ledger")
            last = int((clock.wall() - seconds) * 1_000_000)
            client.hset(key, mapping=dict.fromkeys(entries or self.schedule, last))

    def sent(self, entry: str | None = None) -> list[Message]:
        """The messages in the queue, in the order in which they were sent."""
        with self.broker.client(0) as client:
            found = [_message(json.loads(raw)) for raw in reversed(client.lrange("celery", 0, -1))]
        return [message for message in found if entry in (None, message.entry)]

    def wait_for_sent(self, number: int, entry: str | None = None) -> list[Message]:
        """Wait until that many more messages were sent."""
        wanted = len(self.sent(entry)) + number
        until(lambda: len(self.sent(entry)) >= wanted)
        return self.sent(entry)

    def is_recorded(self, entry: str = "half") -> bool:
        """Whether the last send is recorded: if a beat is killed earlier, the message is sent again."""
        sent = self.sent(entry)
        return bool(sent) and self.ledger().get(entry, 0) >= round(sent[-1].due * 1_000_000)

    def pause_between_ticks(self, beat: Beat, entry: str = "half") -> None:
        pause_between_ticks(beat, self.locks, lambda: self.is_recorded(entry))

    def ledger(self) -> dict[str, int]:
        """The last runs that all beats share."""
        with self.locks.client(2) as client:
            return {entry: int(last) for key in client.keys("*:ledger") for entry, last in client.hgetall(key).items()}

    def environment(self) -> dict[str, str]:
        conf = {
            "broker_url": self.broker.url_of(0),
            "singleton_lock_backend": self.locks.url_of(2),
            "redbeat_redis_url": self.locks.url_of(4),
            "singleton_lock_beat_ttl": 2.0,
            "task_ignore_result": True,
            "result_expires": None,
            **self.conf,
        }
        return {
            "TEST_EVENTS": self.broker.url_of(3),
            "TEST_CONF": json.dumps(conf),
            "TEST_SCHEDULE": json.dumps(self.schedule),
            "TEST_RUNS": str(self.directory / "runs"),
            "SINGLETON_LOCK_RECORD": str(self.directory / "record"),
        }


def _message(raw: Mapping[str, Any]) -> Message:
    headers = raw["headers"]
    (entry,) = json.loads(headers["argsrepr"].replace("'", '"'))
    return Message(entry, headers["id"], datetime.fromisoformat(headers["singleton_lock"]["due"]).timestamp())


def gaps(messages: list[Message], every: float) -> list[tuple[float, float]]:
    """Pairs of due times between which ticks are missing."""
    dues = sorted({message.due for message in messages})
    return [(before, after) for before, after in itertools.pairwise(dues) if after - before > 1.01 * every]


def twice(messages: list[Message]) -> list[str]:
    """Ids that were sent more than once."""
    ids = [message.task_id for message in messages]
    return sorted({task_id for task_id in ids if ids.count(task_id) > 1})


def pause_between_ticks(beat: Beat, locks: RedisServer, is_recorded: Callable[[], bool]) -> None:
    """Stop it while it has claimed nothing, and all that it has sent is recorded: nobody will send that again."""

    def stopped_between() -> bool:
        beat.pause()
        with locks.client(2) as client:
            for _ in range(2):  # By then, the server has carried out what it sent before it stopped.
                client.ping()
            if is_recorded() and not client.keys("*:claim:*"):
                return True
        beat.resume()
        return False

    until(stopped_between)


@contextmanager
def studio(broker: RedisServer, locks: RedisServer, directory: Path) -> Iterator[Studio]:
    with ExitStack() as exits:
        made = Studio(broker, locks, directory, exits)
        yield made
