"""The faults of a rehearsal: what each does, and what must hold then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from celery_singleton_lock import clock
from celery_singleton_lock.backend import Backend, Kind, scheme
from celery_singleton_lock.options.rules import JOIN, REPLACE
from celery_singleton_lock.rehearsal import witness
from celery_singleton_lock.rehearsal.scene import Outcome, Play, Scene
from celery_singleton_lock.rehearsal.witness import Line

#: Seconds within which another worker would begin a run that it must not begin.
GRACE = 2.0

#: Seconds until a worker checks which of its processes have ended, unless it learns that sooner.
NOTICED_IN = 5.0


def perform(play: Play, name: str) -> Outcome:
    """Do this fault, on workers of its own, of which nothing is left afterwards.

    Raises:
        RehearsalFailed: the workers do not start, or the task does not run.
        LockUnavailable: the lock server does not answer.
    """
    words, act = FAULTS[name]
    outcome = Outcome(name, words)
    if why := _obstacle(play, name):
        outcome.notes.append(why)
        return outcome
    with TemporaryDirectory(prefix="rehearsal-") as directory:
        scene = Scene(play, outcome, Path(directory), cut_off=name == "silent")
        try:
            scene.start()
            act(scene)
            scene.judge()
        finally:
            scene.end()
    return outcome


def _obstacle(play: Play, name: str) -> str:
    """Why this fault cannot be done; empty if it can."""
    backend = play.runtime.settings.backend
    if name == "killed" and play.pool != "prefork":
        return f"the {play.pool} pool has no process for each task that could be killed"
    if name == "silent" and not can_be_rerouted(backend, play.runtime.settings.transport_options):
        return f"no proxy can be put in front of {backend.masked}: only in front of redis:// URLs, without TLS"
    return ""


def can_be_rerouted(backend: Backend, transport_options: Iterable[str]) -> bool:
    """Whether a proxy can be in between: Sentinels and clusters name their servers themselves, and TLS checks names."""
    is_plain = all(scheme(url) == "redis" for url in backend.urls) and not any("ssl" in it for it in transport_options)
    return is_plain and backend.kind in (Kind.SERVER, Kind.REDLOCK)


def _together(it: Scene) -> None:
    options, notes = it.play.options, it.outcome.notes
    for number in range(it.play.calls):
        it.send(number % 2)
    it.expect(it.until(lambda: it.seen("began")), "none of the calls ran")
    if options.on_conflict == REPLACE:
        notes.append("on_conflict is 'replace', and rehearsed as 'rerun': its calls wait for each other")
    it.until(lambda: all(it.seen("met", task_id) for task_id in it.sent), GRACE)
    clock.sleep(GRACE)
    let = it.let_end()
    if options.limit >= it.play.calls:
        notes.append(f"lock_limit is {options.limit}: {it.play.calls} calls do not fill it")
    if options.wait or options.on_conflict in ("retry", JOIN):
        it.until(lambda: not it.unended())
        it.outcome.recovery = _next_run(it, let)


def _kill_child(it: Scene) -> None:
    run, task = it.begin(), it.play.task
    os.kill(run.pid, signal.SIGKILL)
    is_rejected = task.acks_late and task.reject_on_worker_lost
    if not (is_rejected or getattr(task, "retry_on_worker_lost", False)):
        it.lose(
            run,
            "the call whose process was killed is lost, by Celery's options for this task; to run it "
            "again, set acks_late=True and reject_on_worker_lost=True",
        )
    _goes_on_elsewhere(it, run, min(it.play.options.ttl, NOTICED_IN) + GRACE)


def _kill_worker(it: Scene) -> None:
    run = it.begin()
    it.kill_worker(0)
    if it.play.task.acks_late:
        it.lose(run, "the broker delivers the killed worker's call again in its own time, which is not awaited")
    else:
        it.lose(
            run,
            "the killed worker's call is lost, by Celery's options for this task; to run it again, set acks_late=True",
        )
    _goes_on_elsewhere(it, run, it.play.options.ttl + GRACE)


def _fall_silent(it: Scene) -> None:
    run = it.begin()
    it.detour.speaks.clear()
    it.send(1)
    # A renewal may be due at once, and a third of the ttl later the lease is given up.
    clock.sleep(it.play.options.ttl / 4)
    it.detour.speaks.set()
    spoke = clock.now()
    clock.sleep(it.play.options.ttl / 3)
    it.expect(not it.seen("ended", run.task_id), "the run was stopped, though the server was back in time")
    it.let_end()
    it.until(lambda: not it.unended())
    it.outcome.recovery = _next_run(it, spoke)


def _deliver_again(it: Scene) -> None:
    run = it.begin()
    _send_copy(it, run)
    clock.sleep(it.play.options.ttl)
    it.expect(len(it.seen("began")) == 1, "a copy ran while the message was running")
    it.let_end()
    it.until(lambda: it.seen("ended"))
    _send_copy(it, run)
    if it.play.runtime.settings.done_ttl == 0:
        it.outcome.notes.append("singleton_lock_done_ttl is 0: a copy of a finished message runs again")
    else:
        again = sum(line.retries == run.retries for line in it.seen("began")) - 1
        it.expect(not again, "a copy ran after the message was finished")


def _send_copy(it: Scene, run: Line) -> None:
    """Deliver a message again, and give it time to run where it must not."""
    met = len(it.seen("met"))
    it.send_again(run.task_id)
    it.expect(it.until(lambda: len(it.seen("met")) > met), "no worker took the copy")
    clock.sleep(GRACE)


def _goes_on_elsewhere(it: Scene, run: Line, seconds: float) -> None:
    """Check that a killed run leaves its lock within that time, and that the task's next call runs."""
    witness.write(it.directory, "killed", run=run.run)
    at = it.let_end()
    free = it.until(lambda: run.pid not in it.holders(), seconds)
    it.outcome.recovery = clock.now() - at
    it.expect(free, f"its lock was still held {seconds:g} s later")
    it.send(1)
    it.expect(it.until(lambda: _next_run(it, at)), "no call ran after it")


def _next_run(it: Scene, since: float) -> float | None:
    """Seconds until the task's next run began."""
    return next((run.at - since for run in it.seen("began") if run.at > since), None)


#: The faults, by name: each in words, and how it is done.
FAULTS: Mapping[str, tuple[str, Callable[[Scene], None]]] = {
    "together": ("called at once, on two workers", _together),
    "killed": ("its process is killed (SIGKILL)", _kill_child),
    "worker-killed": ("its worker is killed, with all its processes (SIGKILL)", _kill_worker),
    "silent": ("the lock server is silent for a quarter of the ttl", _fall_silent),
    "redelivered": ("the broker delivers it again, before and after its end", _deliver_again),
}
