"""A flood: senders and workers on their own Redis, the kills, and the judge's verdict."""

from __future__ import annotations

import json
import os
import random
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from celery import states

from celery_singleton_lock import clock
from tests import appended, programs
from tests.integration.workers import Process, Worker, environment
from tests.patience import until
from tests.redis_server import RedisServer
from tests.storm import history
from tests.storm.flood.app import make
from tests.storm.flood.judge import Judge, Verdict
from tests.storm.flood.rules import Rules
from tests.storm.flood.sender import send
from tests.storm.scene import children_of

#: Processes that send, workers, and processes of each worker.
SENDERS, WORKERS, CHILDREN = 8, 2, 4

#: Seconds of a lease, and until the broker redelivers an unacknowledged message.
TTL, VISIBLE = 2.0, 5

#: Seconds between two kills, and their maximum number: on a machine that is busy with other work, a program takes
#: longer to start than it then lives.
GAPS, KILLS = (0.1, 0.5), 60

#: Seconds between two looks, and until a job that is not free is sent again.
PACE = 0.2

#: Seconds beyond the bound in which a busy machine runs what was waiting at the last kill.
BUSY = 60.0


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        scopes: each gets an equal share of the sends.
        sends: number of sends in all.
        jobs: number of jobs of each scope.
        is_deadly: whether senders and workers are killed.
        queue_ttl: as in `Rules`.
    """

    scopes: Sequence[str]
    sends: int
    jobs: int
    is_deadly: bool
    expired_ttl: float
    queue_ttl: float | None = None

    @property
    def rules(self) -> Rules:
        return Rules(self.queue_ttl, self.expired_ttl, TTL, is_late=self.is_deadly)

    @property
    def bound(self) -> float:
        """Seconds within which each job can be sent and run again: a lost message keeps it for the first part, a
        redelivered message for the second.
        """
        return max(self.queue_ttl or 0.0, self.expired_ttl) + 2 * VISIBLE + TTL


class Log:
    """The growing history: each line is read once."""

    def __init__(self, path: Path, judge: Judge) -> None:
        path.touch()
        self._file, self._judge, self._rest = path.open("rb"), judge, b""

    def close(self) -> None:
        self._file.close()

    def follow(self) -> None:
        """Read the new lines."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self._judge.read(map(json.loads, lines))


class Flood:
    def __init__(self, plan: Plan, directory: Path, seed: int, exits: ExitStack) -> None:
        self._plan, self._directory, self._exits = plan, directory, exits
        self._chance = random.Random(seed)
        self._server = exits.enter_context(RedisServer())
        self._history = directory / "history"
        self.judge = Judge(plan.rules, plan.bound + BUSY)
        self._log = Log(self._history, self.judge)
        exits.callback(self._log.close)
        self._senders: dict[Process, int] = {}
        self._workers: list[Worker] = []
        self._started = 0
        broker = {"visibility_timeout": VISIBLE, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        # A worker killed during a redelivery keeps the others from redelivering: for five minutes by default.
        broker["unacked_mutex_expire"] = VISIBLE
        self._conf: dict[str, Any] = {
            "broker_url": self._server.url_of(0),
            "result_backend": self._server.url_of(1),
            "singleton_lock_backend": self._server.url_of(2),
            "singleton_lock_ttl": TTL,
            **({"broker_transport_options": broker, "worker_prefetch_multiplier": 1} if plan.is_deadly else {}),
        }

    # The processes that take part.

    def start_senders(self, sends: int) -> None:
        for number in range(SENDERS):
            self._start_sender(sends // SENDERS + (number < sends % SENDERS))

    def _start_sender(self, sends: int) -> None:
        self._started += 1
        scopes = ",".join(self._plan.scopes)
        arguments = [str(self._chance.random()), str(sends), str(self._plan.jobs), scopes]
        sender = _Sender(self._started, arguments, self._directory, self._environment())
        self._senders[self._exits.enter_context(sender)] = sends

    def start_workers(self) -> None:
        started = [self._start_worker() for _ in range(WORKERS)]
        for worker in started:
            worker.wait_until_ready()

    def _start_worker(self) -> Worker:
        self._started += 1
        env = {**self._environment(), **environment(self._conf, events=self._server.url_of(3), record=self._history)}
        worker = Worker(
            f"worker-{self._started}",
            directory=self._directory,
            environment=env,
            concurrency=CHILDREN,
            app="tests.storm.flood.app",
            arguments=("-l", "WARNING"),
        )
        self._workers.append(self._exits.enter_context(worker))
        return worker

    def _environment(self) -> dict[str, str]:
        told = {"TEST_CONF": json.dumps(self._conf), history.HISTORY: str(self._history)}
        return {**told, **self._plan.rules.environment()}

    # What happens.

    def wait_for_senders(self) -> None:
        until(lambda: all(sender.process.poll() is not None for sender in self._senders), "all was sent")
        failed = [sender.log for sender in self._senders if sender.process.poll()]
        if failed and not self._plan.is_deadly:
            raise AssertionError(failed[0][-3000:])

    def kill_until_all_is_sent(self) -> None:
        """Kill one process after another, a worker as soon as something is sent; senders' successors send the rest."""
        until(self._has_begun, "something is sent")
        self._kill_worker()
        for _ in range(KILLS):
            clock.sleep(self._chance.uniform(*GAPS))
            if all(sender.process.poll() is not None for sender in self._senders):
                break
            self._chance.choice([self._kill_sender, self._kill_sender, self._kill_worker, self._kill_child])()
        self.wait_for_senders()

    def _has_begun(self) -> bool:
        self._log.follow()
        return bool(self.judge.messages)

    def _kill_sender(self) -> None:
        """Kill a sender that has begun to send: killed before, neither it nor its successors might do anything."""
        self._log.follow()
        begun = Counter(one.pid for one in self.judge.messages.values())
        alive = [one for one in self._senders if one.process.poll() is None and begun[one.process.pid]]
        if not alive:
            return
        victim = self._chance.choice(alive)
        self._kill("sender", victim.process.pid, victim.kill)
        self._log.follow()
        begun = Counter(one.pid for one in self.judge.messages.values())
        if left := self._senders.pop(victim) - begun[victim.process.pid]:
            self._start_sender(left)

    def _kill_worker(self) -> None:
        victim = self._chance.choice(self._workers)
        self._workers.remove(victim)
        self._kill("worker", victim.process.pid, victim.kill)
        self._start_worker()

    def _kill_child(self) -> None:
        victim = self._chance.choice(children_of(self._chance.choice(self._workers).process.pid) or [0])
        if victim:
            self._kill("child", victim, partial(_kill_at_once, victim))

    def _kill(self, what: str, pid: int, kill: Callable[[], object]) -> None:
        """Kill, and note when it is gone: a busy machine lets it go on for a moment."""
        since = clock.now()
        kill()
        self._note("killed", what=what, id=pid, since=since)

    def _note(self, event: str, **fields: Any) -> None:
        line = {"at": clock.now(), "host": "", "pid": os.getpid(), "event": event, **fields}
        appended.append(self._history, line)

    def count_queue(self) -> None:
        """Note how many messages of each scope the broker has."""
        with self._server.client(0) as client:
            found = Counter(json.loads(message)["headers"]["task"] for message in client.lrange("celery", 0, -1))
        for scope in self._plan.scopes:
            self._note("length", scope=scope, length=found[scope])

    def wait_until_all_is_over(self) -> None:
        """Wait until each sent message has run or was refused, or is lost where workers were killed."""
        until(self._is_over, "all messages are over")

    def _is_over(self) -> bool:
        clock.sleep(PACE)
        self._log.follow()
        messages = self.judge.messages.values()
        if all(one.is_over for one in messages if one.is_sent):
            return True
        return self._plan.is_deadly and self._is_broker_empty()

    def _is_broker_empty(self) -> bool:
        with self._server.client(0) as client:
            return client.llen("celery") + client.hlen("unacked") == 0

    def free_all(self) -> None:
        """Send each job until one of its messages runs, and note when that began."""
        self._note("calm_begins")
        with _here(self._environment()):
            app = make(self._conf, self._plan.rules)
            left = {(scope, f"job {number}"): "" for scope in self._plan.scopes for number in range(self._plan.jobs)}
            deadline = clock.now() + self._plan.bound + BUSY
            while left and clock.now() < deadline:
                for (scope, job), message in left.items():
                    if not message or self._is_refused(message):
                        left[scope, job] = send(app, scope, job)
                clock.sleep(PACE)
                self._log.follow()
                for place in [place for place, message in left.items() if self._runs(message)]:
                    scope, job = place
                    at = next(one.start for one in self.judge.messages[left.pop(place)].deliveries if one.start)
                    self._note("free_again", scope=scope, job=job, begun=at)

    def _is_refused(self, message: str) -> bool:
        found = self.judge.messages[message]
        return found.outcome == "duplicate" or (found.is_over and not found.has_run)

    def _runs(self, message: str) -> bool:
        return any(one.start for one in self.judge.messages[message].deliveries)

    def end(self) -> Verdict:
        """Judge. The workers are killed afterwards: in a shutdown, Celery's pool no longer reads from its children, and
        waits forever for a child that is about to report the end of its task.
        """
        self._log.follow()
        self._note_revoked()
        self._log.follow()
        return self.judge.verdict()

    def _note_revoked(self) -> None:
        """Note which messages were refused by a process that did not live to report it."""
        app = make(self._conf, self._plan.rules)
        silent = [name for name, one in self.judge.messages.items() if one.is_sent and not one.is_over]
        for name in silent:
            if app.AsyncResult(name).state == states.REVOKED:
                self._note("revoked", message=name)


class _Sender(Process):
    def __init__(self, number: int, arguments: Sequence[str], directory: Path, env: dict[str, str]) -> None:
        self.name, self._log = f"sender-{number}", directory / f"sender-{number}.log"
        self._log.touch()
        self._log_begins, self._is_touched = 0, False
        self.process = programs.start("tests.storm.flood.sender", arguments, environment=env, output=self._log)


@contextmanager
def _here(env: dict[str, str]) -> Iterator[None]:
    """Write to the history in this process, too."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def flood(plan: Plan, directory: Path, seed: int, say: Callable[[str], object] = lambda text: None) -> Verdict:
    """Run a flood.

    Args:
        plan: what is to happen.
        directory: for the history and the logs of all processes.
        seed: decides what is sent in which order, and which process is killed when.
        say: called with what happens now.
    """
    with ExitStack() as exits:
        made = Flood(plan, directory, seed, exits)
        if plan.is_deadly:
            _kill_while_sending(made, plan, say)
        else:
            _send_before_and_beside_workers(made, plan, say)
        return made.end()


def _send_before_and_beside_workers(made: Flood, plan: Plan, say: Callable[[str], object]) -> None:
    say("sending, without workers")
    made.start_senders(plan.sends // 2)
    made.wait_for_senders()
    made.count_queue()
    say("sending, beside workers")
    made.start_workers()
    made.start_senders(plan.sends - plan.sends // 2)
    made.wait_for_senders()
    made.wait_until_all_is_over()


def _kill_at_once(pid: int) -> None:
    """Kill a process, and wait until it is gone."""
    with suppress(ProcessLookupError):
        gone = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([gone], [], [])
        finally:
            os.close(gone)


def _kill_while_sending(made: Flood, plan: Plan, say: Callable[[str], object]) -> None:
    say("sending, and killing")
    made.start_workers()
    made.start_senders(plan.sends)
    made.kill_until_all_is_sent()
    say("sending each job again")
    made.free_all()
    made.wait_until_all_is_over()
