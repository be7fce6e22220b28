"""The faults of a rehearsal: what each does, and what must hold then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from celery_singleton_lock import clock
from celery_singleton_lock.options.rules import JOIN, REPLACE
from celery_singleton_lock.rehearsal.history import Run
from celery_singleton_lock.rehearsal.proxy import can_be_rerouted
from celery_singleton_lock.rehearsal.scene import Play, Scene, scene

#: Seconds within which another worker would begin a run that it must not begin.
GRACE = 2.0

#: Seconds until a worker checks which of its processes have ended, unless it learns that sooner.
NOTICED_IN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of the faults.

    Attributes:
        name: its name for the command line.
        words: what it does, in words.
        act: does it.
        cuts_off: whether it silences the lock server.
        needs: says why it cannot be done; None if it can.
    """

    name: str
    words: str
    act: Callable[[Scene], None]
    cuts_off: bool = False
    needs: Callable[[Play], str | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a fault.

    Attributes:
        fault: the name of the fault.
        words: what was done, in words.
        kept: whether all promises were kept; None if the fault was left out.
        runs, overlaps: how often the task's body ran, and how often it overlapped another run.
        recovery: seconds until the lock was free, or the task ran again; None if nothing had to recover.
        broken: the promises that were not kept.
        notes: what the options make impossible, and other remarks.
    """

    fault: str
    words: str
    kept: bool | None
    runs: int = 0
    overlaps: int = 0
    recovery: float | None = None
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def rehearse(play: Play, faults: Iterable[Fault]) -> Iterator[Outcome]:
    """Do one fault after the other, each on its own workers.

    Raises:
        RehearsalFailed: the workers do not start, or the task does not run.
        LockUnavailable: the lock server does not answer.
    """
    for fault in faults:
        if (why := fault.needs(play)) is not None:
            yield Outcome(fault.name, fault.words, None, notes=(why,))
            continue
        with scene(play, cut_off=fault.cuts_off) as made:
            fault.act(made)
            made.close()
            recovery = None if made.recovery is None else round(made.recovery, 3)
            seen = (len(made.runs), made.overlaps, recovery, tuple(made.broken), tuple(made.notes))
        yield Outcome(fault.name, fault.words, not made.broken, *seen)


def _together(it: Scene) -> None:
    sent = [it.send(number % 2) for number in range(it.play.calls)]
    it.expect(it.until(lambda: it.runs), "none of the calls ran")
    if it.play.options.on_conflict == REPLACE:
        it.note("on_conflict is 'replace', and rehearsed as 'rerun': its calls wait for each other")
    it.until(lambda: all(map(it.met, sent)), GRACE)
    clock.sleep(GRACE)
    let = it.let_end()
    if it.play.options.limit >= len(sent):
        it.note(f"lock_limit is {it.play.options.limit}: {len(sent)} calls do not fill it")
    if it.play.options.wait or it.play.options.on_conflict in ("retry", JOIN):
        it.until(lambda: all(map(it.has_ended, sent)))
        it.recovery = _next_run(it, let)


def _kill_child(it: Scene) -> None:
    first = it.send(0)
    run = it.begun(first)
    os.kill(run.began.pid, signal.SIGKILL)
    if not _comes_again(it.play):
        it.excuse(first)
        it.note(
            "the call whose process was killed is lost, by Celery's options for this task; to run it "
            "again, set acks_late=True and reject_on_worker_lost=True"
        )
    _goes_on_elsewhere(it, run, min(it.play.options.ttl, NOTICED_IN) + GRACE)


def _kill_worker(it: Scene) -> None:
    first = it.send(0)
    run = it.begun(first)
    it.workers[0].kill()
    it.excuse(first)
    if it.play.task.acks_late:
        it.note("the broker delivers the killed worker's call again in its own time, which is not awaited")
    else:
        it.note(
            "the killed worker's call is lost, by Celery's options for this task; to run it again, set acks_late=True"
        )
    _goes_on_elsewhere(it, run, it.play.options.ttl + GRACE)


def _deliver_again(it: Scene) -> None:
    first = it.send(0)
    run = it.begun(first)
    it.send_again(first)
    it.expect(it.until(lambda: it.met(first) > 1), "no worker took the copy")
    clock.sleep(it.play.options.ttl + GRACE)
    it.expect(len(it.of(first)) == 1, "a copy ran while the message was running")
    it.let_end()
    it.until(lambda: it.has_run_to_its_end(run))
    met = it.met(first)
    it.send_again(first)
    it.expect(it.until(lambda: it.met(first) > met), "no worker took the second copy")
    clock.sleep(GRACE)
    again = sum(other.began.retries == run.began.retries for other in it.of(first)) - 1
    if it.play.runtime.settings.done_ttl == 0:
        it.note("singleton_lock_done_ttl is 0: a copy of a finished message runs again")
    else:
        it.expect(not again, "a copy ran after the message was finished")


def _fall_silent(it: Scene) -> None:
    run = it.begun(it.send(0))
    it.detour.fall_silent()
    it.send(1)
    # A renewal may be due at once, and a third of the ttl later the lease is given up.
    clock.sleep(it.play.options.ttl / 4)
    it.detour.speak()
    spoke = clock.now()
    clock.sleep(it.play.options.ttl / 3)
    it.expect(not it.has_run_to_its_end(run), "the run was stopped, though the server was back in time")
    it.let_end()
    it.until(lambda: all(map(it.has_ended, it.sent)))
    it.recovery = _next_run(it, spoke)


def _goes_on_elsewhere(it: Scene, run: Run, seconds: float) -> None:
    """Check that a killed run leaves its lock within that time, and that the task's next call runs."""
    at = it.cut[run.began.run] = it.let_end()
    free = it.until(lambda: run.began.pid not in it.holders(), seconds)
    it.recovery = clock.now() - at
    it.expect(free, f"its lock was still held {seconds:g} s later")
    it.send(1)
    it.expect(it.until(lambda: _next_run(it, at)), "no call ran after it")


def _next_run(it: Scene, since: float) -> float | None:
    """Seconds until the task's next run began."""
    return next((run.began.at - since for run in it.runs if run.began.at > since), None)


def _comes_again(play: Play) -> bool:
    late = play.task.acks_late and play.task.reject_on_worker_lost
    return bool(late or getattr(play.task, "retry_on_worker_lost", False))


def _children(play: Play) -> str | None:
    return None if play.pool == "prefork" else f"the {play.pool} pool has no process for each task that could be killed"


def _reroutable(play: Play) -> str | None:
    settings = play.runtime.settings
    encrypted = any("ssl" in name for name in settings.transport_options)
    if can_be_rerouted(settings.backend, encrypted):
        return None
    return f"no proxy can be put in front of {settings.backend.masked}: only in front of redis:// URLs, without TLS"


FAULTS = (
    Fault(name="together", words="called at once, on two workers", act=_together),
    Fault(name="killed", words="its process is killed (SIGKILL)", act=_kill_child, needs=_children),
    Fault(name="worker-killed", words="its worker is killed, with all its processes (SIGKILL)", act=_kill_worker),
    Fault(
        name="silent",
        words="the lock server is silent for a quarter of the ttl",
        act=_fall_silent,
        cuts_off=True,
        needs=_reroutable,
    ),
    Fault(name="redelivered", words="the broker delivers it again, before and after its end", act=_deliver_again),
)
