"""The faults of a rehearsal: what each does, and what must hold then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from celery_singleton_lock import clock
from celery_singleton_lock.rehearsal import witness
from celery_singleton_lock.rehearsal.scene import Outcome, Play, Scene
from celery_singleton_lock.rehearsal.witness import Line

#: Seconds within which another worker would begin a run that it must not begin.
GRACE = 2.0

#: Seconds until a worker checks which of its processes have ended, unless it learns that sooner.
NOTICED_IN = 5.0

_LOST = "the killed call is lost, by Celery's options for this task; to run it again, set {}"


def perform(play: Play, name: str) -> Outcome:
    """Do this fault, on workers of its own, of which nothing is left afterwards.

    Raises:
        RehearsalFailed: the workers do not start, or the task does not run.
        LockUnavailable: the lock server does not answer.
    """
    outcome = Outcome(name)
    if name == "killed" and play.pool != "prefork":
        outcome.notes.append(f"the {play.pool} pool has no process for each task that could be killed")
        return outcome
    with TemporaryDirectory(prefix="rehearsal-") as directory, closing(Scene(play, outcome, Path(directory))) as scene:
        scene.start()
        FAULTS[name][1](scene)
        scene.judge()
    return outcome


def _together(it: Scene) -> None:
    for number in range(2):
        it.send(number)
    it.expect(it.until(lambda: it.seen("began")), "none of the calls ran")
    it.until(lambda: all(it.seen("met", task_id) for task_id in it.messages), GRACE)
    clock.sleep(GRACE)


def _kill_child(it: Scene) -> None:
    task = it.play.task
    comes_again = (task.acks_late and task.reject_on_worker_lost) or getattr(task, "retry_on_worker_lost", False)
    lost = "" if comes_again else _LOST.format("acks_late=True and reject_on_worker_lost=True")
    _kill(it, lambda run: os.kill(run.pid, signal.SIGKILL), min(it.play.ttl, NOTICED_IN), lost)


def _kill_worker(it: Scene) -> None:
    later = "the broker delivers the killed call again in its own time, which is not awaited"
    lost = later if it.play.task.acks_late else _LOST.format("acks_late=True")
    _kill(it, lambda _: it.kill_worker(0), it.play.ttl, lost)


def _kill(it: Scene, kill: Callable[[Line], None], free_within: float, lost: str) -> None:
    """Kill a run, and check that its lock is free within that time, and that the task's next call runs.

    Args:
        lost: why the killed call is not expected to end; empty if it is.
    """
    run = it.begin()
    it.outcome.notes += filter(None, [lost])
    witness.write(it.directory, "killed", task_id=run.task_id if lost else "")
    kill(run)
    at = it.let_end()
    free = it.until(lambda: run.pid not in it.holders(), free_within + GRACE)
    it.outcome.recovery = clock.now() - at
    it.expect(free, f"its lock was still held {free_within + GRACE:g} s later")
    it.send(1)
    it.expect(it.until(lambda: any(later.at > at for later in it.seen("began"))), "no call ran after it")


def _fall_silent(it: Scene) -> None:
    run, ttl = it.begin(), it.play.ttl
    # So that a renewal is due meanwhile, a third of the ttl after the last; another third later the lease is given up.
    clock.sleep(max(run.at + ttl / 5 - clock.now(), 0.0))
    (it.directory / witness.SILENCE).touch()
    it.send(1)
    clock.sleep(ttl / 4)
    (it.directory / witness.SILENCE).unlink()
    clock.sleep(ttl / 3)
    it.expect(not it.seen("ended", run.task_id), "the run was stopped, though the server was back in time")


def _deliver_again(it: Scene) -> None:
    run = it.begin()
    _copy_does_not_run(it, run, "while the message was running", it.play.ttl + GRACE)
    it.let_end()
    it.until(lambda: it.seen("ended"))
    if it.runtime.settings.done_ttl == 0:
        it.outcome.notes.append("singleton_lock_done_ttl is 0: a copy of a finished message would run again")
    else:
        _copy_does_not_run(it, run, "after the message was finished", GRACE)


def _copy_does_not_run(it: Scene, run: Line, moment: str, seconds: float) -> None:
    """Deliver a message again, and give it time to run where it must not."""
    met = len(it.seen("met"))
    it.send_again(run.task_id)
    it.expect(it.until(lambda: len(it.seen("met")) > met), "no worker took the copy")
    clock.sleep(seconds)
    again = sum(line.retries == run.retries for line in it.seen("began")) > 1
    it.expect(not again, f"a copy ran {moment}")


#: The faults, by name: a description for display, and how it is done.
FAULTS: Mapping[str, tuple[str, Callable[[Scene], None]]] = {
    "together": ("called at once, on two workers", _together),
    "killed": ("its process is killed (SIGKILL)", _kill_child),
    "worker-killed": ("its worker is killed, with all its processes (SIGKILL)", _kill_worker),
    "silent": ("the lock server is silent for a quarter of the ttl", _fall_silent),
    "redelivered": ("the broker delivers it again, before and after its end", _deliver_again),
}
