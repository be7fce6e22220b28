"""Two versions side by side, as during a deploy: the same locks, messages and records, in both directions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from redis import Redis

from celery_singleton_lock import LockConflict
from celery_singleton_lock.testing import RedisServer
from tests.packaging.test_wheel import ROOT, run
from tests.patience import LIMIT, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two_versions")]

#: The version that the current one is deployed beside: the last one whose holders had no labels.
OLD = "6558b59f5ac4c4dcd734e752f978598d0363f44e"

SIDES = ("old", "new")


class Deploy:
    """A server, and workers, beats and senders of both versions.

    Args:
        directory: for logs and schedules.
        server: broker, results, locks and the record of what ran.
        paths: where each version is imported from.
    """

    def __init__(self, directory: Path, server: RedisServer, paths: dict[str, str]) -> None:
        self._directory = directory
        self._paths = paths
        self._url = server.url_of(0).rpartition("/")[0]
        self._app = Celery("shop", backend=f"{self._url}/1", set_as_current=False)
        self._exits = ExitStack()
        self.broker: Redis = self._exits.enter_context(Redis.from_url(f"{self._url}/0"))
        self.locks: Redis = self._exits.enter_context(Redis.from_url(f"{self._url}/2", decode_responses=True))
        self._record: Redis = self._exits.enter_context(Redis.from_url(f"{self._url}/3", decode_responses=True))

    def __enter__(self) -> Deploy:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def start(self, side: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a Celery program that ends with this deploy."""
        log = self._exits.enter_context((self._directory / f"{name}.log").open("wb"))
        arguments = [sys.executable, "-m", "celery", "-A", "any_version", *command, "-l", "INFO"]
        program = subprocess.Popen(
            arguments,
            cwd=self._directory,
            env=self._environment(side, name),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._exits.callback(kill, program)
        return program

    def worker(self, side: str, name: str = "", *queues: str) -> subprocess.Popen[bytes]:
        """A worker with its own queues, as soon as it is ready."""
        name = name or side
        program = self.start(
            side, name, "worker", "-n", f"{name}@here", "-Q", ",".join(queues or (name,)), "-c", "4", "--without-mingle"
        )
        until(lambda: f"{name}@here ready" in self.log(name), f"worker {name} is ready")
        return program

    @contextmanager
    def beat(self, side: str, name: str, says: str) -> Iterator[subprocess.Popen[bytes]]:
        """A beat, as soon as its log has this text."""
        program = self.start(side, name, "beat", "-S", "exclusive", "--pidfile", "")
        try:
            until(lambda: says in self.log(name), f"beat {name}: {says}")
            yield program
        finally:
            kill(program)

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def run(self, side: str, *command: str) -> str:
        """Run a program of this version; returns what it printed."""
        return run(sys.executable, *command, cwd=self._directory, **self._environment(side, "program"))

    def send(self, side: str, task: str, job: str, queue: str) -> str:
        """Send with a program of this version; returns the type of its answer, and an id."""
        return self.run(side, "-m", "any_version", task, job, queue).strip()

    def sent(self, side: str, task: str, job: str, queue: str) -> AsyncResult:
        """The result of a message that must really be sent."""
        kind, _, task_id = self.send(side, task, job, queue).partition(" ")
        assert kind == "AsyncResult"
        return self.result(task_id)

    def result(self, task_id: str) -> AsyncResult:
        return AsyncResult(task_id, app=self._app)

    def runs(self, job: str) -> list[tuple[str, str]]:
        """What a job did: whether it started or ended, and by which version."""
        entries = map(json.loads, self._record.lrange("record", 0, -1))
        return [(what, side) for what, of, side, *_ in entries if of == job]

    def wait_for(self, job: str, *expected: tuple[str, str]) -> None:
        until(lambda: len(self.runs(job)) >= len(expected), f"{job}: {expected}")
        assert self.runs(job) == list(expected)

    def let_end(self, job: str) -> None:
        self._record.rpush(f"end:{job}", "")

    def _environment(self, side: str, name: str) -> dict[str, str]:
        path = os.pathsep.join([self._paths[side], str(self._directory)])
        return {
            **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            "PYTHONPATH": path,
            "SHOP": self._url,
            "SIDE": side,
            "SCHEDULE": str(self._directory / f"schedule-{name}"),
        }


def kill(program: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to it and its children, as if the host had died."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where each version is imported from; the old one is built from its commit, and installed as a wheel."""
    known = subprocess.run(["git", "cat-file", "-e", OLD], cwd=ROOT, capture_output=True, check=False, timeout=LIMIT)
    if known.returncode:
        pytest.skip("the old version is only in the project's history, which is incomplete here")
    folder = tmp_path_factory.mktemp("old")
    archive = subprocess.run(["git", "archive", OLD], cwd=ROOT, capture_output=True, check=True, timeout=LIMIT).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as source:
        source.extractall(folder / "source", filter="data")
    run(sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", folder / "site", wheel, cwd=folder)
    return {"old": str(folder / "site"), "new": str(ROOT)}


@pytest.fixture(scope="module")
def deploy(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploy]:
    """A worker of each version, each with the queue of that name."""
    directory = tmp_path_factory.mktemp("deploy")
    (directory / "any_version.py").write_text(Path(__file__).with_name("any_version.py").read_text())
    with RedisServer() as server, Deploy(directory, server, paths) as deploy:
        for side in SIDES:
            deploy.worker(side)
        yield deploy


@pytest.fixture(params=[("old", "new"), ("new", "old")], ids="-then-".join)
def order(request: pytest.FixtureRequest) -> Sequence[str]:
    return request.param


@pytest.fixture
def job(request: pytest.FixtureRequest, order: Sequence[str]) -> str:
    """A job for this test alone."""
    return f"{request.node.name.partition('[')[0]}-{'-'.join(order)}"


def test_each_side_imports_its_own_version(deploy: Deploy, paths: dict[str, str]) -> None:
    for side in SIDES:
        code = "import celery_singleton_lock as it; print(it.__file__)"
        assert deploy.run(side, "-c", code).startswith(paths[side])


@pytest.mark.parametrize(("task", "error"), [("skips", TaskRevokedError), ("raises", LockConflict)])
def test_copy_is_refused_while_the_other_side_holds(
    deploy: Deploy, order: Sequence[str], job: str, task: str, error: type[Exception]
) -> None:
    first, second = order
    job = f"{job}-{task}"
    holder = deploy.sent(first, task, job, first)
    deploy.wait_for(job, ("start", first))
    with pytest.raises(error):
        deploy.sent(second, task, job, second).get(timeout=LIMIT)
    deploy.let_end(job)
    assert holder.get(timeout=LIMIT) == f"{job} by {first}"
    next_one = deploy.sent(second, task, job, second)
    deploy.let_end(job)
    assert next_one.get(timeout=LIMIT) == f"{job} by {second}"


def test_copy_waits_in_line_for_the_other_side(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    deploy.sent(first, "waits", job, first)
    deploy.wait_for(job, ("start", first))
    waiting = deploy.sent(second, "waits", job, second)
    until(lambda: waiting.id in deploy.log(second))
    deploy.let_end(job)
    deploy.let_end(job)
    assert waiting.get(timeout=LIMIT) == f"{job} by {second}"
    deploy.wait_for(job, ("start", first), ("end", first), ("start", second), ("end", second))


def test_slots_are_shared(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    deploy.sent(first, "pairs", job, first)
    deploy.wait_for(job, ("start", first))
    deploy.sent(second, "pairs", job, second)
    deploy.wait_for(job, ("start", first), ("start", second))
    third = deploy.sent(first, "pairs", job, first)
    until(lambda: f"{third.id}] on_conflict=retry" in deploy.log(first))
    for _ in range(3):
        deploy.let_end(job)
    assert third.get(timeout=LIMIT) == f"{job} by {first}"


def test_copy_joins_the_other_sides_run(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    deploy.sent(first, "joins", job, first)
    deploy.wait_for(job, ("start", first))
    joined = deploy.sent(second, "joins", job, second)
    until(lambda: f"{joined.id}] on_conflict=join" in deploy.log(second))
    deploy.let_end(job)
    assert joined.get(timeout=LIMIT) == f"{job} by {first}"
    deploy.wait_for(job, ("start", first), ("end", first))


def test_only_the_newest_runs(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    deploy.sent(first, "reruns", job, first)
    deploy.wait_for(job, ("start", first))
    older = deploy.sent(second, "reruns", job, second)
    until(lambda: f"{older.id}] on_conflict=rerun" in deploy.log(second))
    newest = deploy.sent(first, "reruns", job, first)
    until(lambda: f"{newest.id}] on_conflict=rerun" in deploy.log(first))
    deploy.let_end(job)
    deploy.let_end(job)
    assert newest.get(timeout=LIMIT) == f"{job} by {first}"
    with pytest.raises(TaskRevokedError):
        older.get(timeout=LIMIT)


def test_lock_of_a_worker_that_was_killed_is_taken_over(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    name = f"killed-{job}"
    worker = deploy.worker(first, name)
    deploy.sent(first, "late", job, name)
    deploy.wait_for(job, ("start", first))
    kill(worker)
    next_one = deploy.sent(second, "late", job, second)
    deploy.let_end(job)
    assert next_one.get(timeout=LIMIT) == f"{job} by {second}"


def test_message_that_one_side_has_carried_out_does_not_run_on_the_other(
    deploy: Deploy, order: Sequence[str], job: str
) -> None:
    """The broker delivers it again, to a worker of the other version."""
    first, second = order
    name = f"later-{job}"
    sent = deploy.sent(first, "late", job, name)
    (message,) = deploy.broker.lrange(name, 0, -1)
    deploy.worker(first, name)
    deploy.let_end(job)
    assert sent.get(timeout=LIMIT) == f"{job} by {first}"
    again = json.loads(message)
    again["properties"]["delivery_info"]["routing_key"] = second
    again["properties"]["delivery_info"]["redelivered"] = True
    deploy.broker.lpush(second, json.dumps(again))
    until(lambda: f"[{sent.id}] is already done" in deploy.log(second))
    deploy.wait_for(job, ("start", first), ("end", first))


@pytest.mark.parametrize("task", ["queued", "starts"])
def test_lock_of_a_message_counts_for_both_sides(deploy: Deploy, order: Sequence[str], job: str, task: str) -> None:
    first, second = order
    job = f"{job}-{task}"
    name = f"later-{job}"
    sent = deploy.sent(first, task, job, name)
    assert deploy.send(second, task, job, name) == f"DuplicateResult {sent.id}"
    deploy.worker(second, name)
    deploy.wait_for(job, ("start", second))
    if task == "queued":
        assert deploy.send(first, task, job, name) == f"DuplicateResult {sent.id}"
    deploy.let_end(job)
    assert sent.get(timeout=LIMIT) == f"{job} by {second}"
    again = deploy.sent(first, task, job, name)
    deploy.let_end(job)
    assert again.get(timeout=LIMIT) == f"{job} by {second}"


def test_message_of_the_other_side_is_replaced(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    name = f"later-{job}"
    older = deploy.sent(first, "latest", job, name)
    newer = deploy.sent(second, "latest", job, name)
    deploy.worker(first, name)
    deploy.let_end(job)
    assert newer.get(timeout=LIMIT) == f"{job} by {first}"
    with pytest.raises(TaskRevokedError):
        older.get(timeout=LIMIT)


def test_commands_know_the_holders_of_the_other_side(deploy: Deploy, order: Sequence[str], job: str) -> None:
    first, second = order
    holder = deploy.sent(first, "skips", job, first)
    deploy.wait_for(job, ("start", first))
    shown = deploy.run(second, "-m", "celery", "-A", "any_version", "locks", "list", "--json").splitlines()
    (entry,) = [entry for entry in map(json.loads, shown) if entry.get("task_id") == holder.id]
    assert (entry["name"], entry["node"]) == ("shop.skips", f"{first}@here")
    command = ["-m", "celery", "-A", "any_version", "locks", "release", "--yes", "shop.skips", job]
    with pytest.raises(AssertionError, match="renew"):  # Its holder is alive, so it is not freed.
        deploy.run(second, *command)
    deploy.let_end(job)
    assert holder.get(timeout=LIMIT) == f"{job} by {first}"


def test_one_beat_leads(deploy: Deploy, order: Sequence[str]) -> None:
    """When the leader is killed, the other one takes over, and sends no tick again."""
    first, second = order
    deploy.broker.delete("ticks")
    leads, standby = f"first-{first}", f"second-{second}"
    with deploy.beat(first, leads, "beat: leads schedule") as leader, deploy.beat(second, standby, ") leads schedule"):
        until(lambda: deploy.broker.llen("ticks") >= 2)
        assert "beat: leads schedule" not in deploy.log(standby)
        until(lambda: is_stopped_between_ticks(deploy, leader))
        kill(leader)
        until(lambda: "beat: leads schedule" in deploy.log(standby))
        number = deploy.broker.llen("ticks")
        until(lambda: deploy.broker.llen("ticks") >= number + 2)
    ids = [headers(message)["id"] for message in deploy.broker.lrange("ticks", 0, -1)]
    assert len(set(ids)) == len(ids)


def is_stopped_between_ticks(deploy: Deploy, leader: subprocess.Popen[bytes]) -> bool:
    """Stop the leader; let it go on if it has not recorded its last tick yet: that one would be sent again."""
    os.kill(leader.pid, signal.SIGSTOP)
    (newest,) = deploy.broker.lrange("ticks", 0, 0)
    due = datetime.fromisoformat(headers(newest)["singleton_lock_due"]).timestamp()
    ledgers = [deploy.locks.hgetall(key) for key in deploy.locks.scan_iter("*:ledger")]
    is_recorded = any(int(last) / 1e6 >= due for ledger in ledgers for last in ledger.values())
    if not is_recorded:
        os.kill(leader.pid, signal.SIGCONT)
    return is_recorded


def headers(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message)["headers"]
    return found
