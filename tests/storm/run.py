"""A storm: load and nemeses for some minutes, then a calm, then the checker's verdict."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from celery import states
from redis import Redis

from celery_singleton_lock import DuplicateResult, clock
from tests import appended
from tests.storm.app import SCOPED, end_of
from tests.storm.checker import Checker, Verdict
from tests.storm.clicks import JOBS
from tests.storm.load import HOT, Load, length_of
from tests.storm.nemesis import Nemesis, nemeses, raging
from tests.storm.scene import TTL, Scene, scene
from tests.storm.waiting import QUEUE_TTL

#: Seconds within which everything ends after the faults: copies wait for leases, and are put back for some seconds.
CALM = 120.0

#: Seconds after which messages without an end that are not in the broker count as lost.
UNSEEN = 5.0

#: Seconds after which a lock without a holder must be gone.
FREE = 2 * TTL

#: The same for the lock of a lost message: its countdown, its ttl, and the time that a send takes.
FREE_OF_MESSAGE = QUEUE_TTL + 10.0


def storm(
    directory: Path,
    seed: int,
    minutes: float,
    *,
    place: str = "server",
    package: str = "",
    mutant: str = "",
    kinds: Callable[[str], bool] = lambda name: True,
    enough: Callable[[Verdict], bool] | None = None,
) -> Verdict:
    """Run a storm.

    Args:
        directory: for the history and the logs of all processes.
        seed: decides what is sent and what goes wrong.
        minutes: until the calm.
        place: where the locks are, as named in `places.py`.
        package: which locks the tasks; ours by default.
        mutant: of our package, which the workers run.
        kinds: selects the faults.
        enough: ends the storm, without a calm, once this is true of the findings so far; called now and then.
    """
    with scene(directory, place=place, package=package, mutant=mutant) as made, contextlib.ExitStack() as exits:
        checker = Checker(TTL, quorum=made.place.quorum, servers=len(made.place.servers))
        load = Load(made, seed)
        exits.callback(load.close)
        deadline = clock.now() + 60 * minutes
        angry = nemeses(made, seed, kinds)
        with _going_on(load, angry):
            while clock.now() < deadline and not any(nemesis.error for nemesis in angry):
                clock.sleep(1)
                if enough and enough(verdict := checker.judge(appended.read(made.history), is_over=False)):
                    return verdict
        _calm(made, load)
        return checker.judge(appended.read(made.history))


@contextlib.contextmanager
def _going_on(load: Load, angry: list[Nemesis]) -> Iterator[None]:
    load.start()
    with raging(angry):
        try:
            yield
        finally:
            load.stop()


def _calm(made: Scene, load: Load) -> None:
    """Wait for everything to end, and record what does not."""
    for host in made.hosts.values():
        if host.sender is not None:
            host.sender.kill()
            host.sender = None
    clicked = {line["message"] for line in appended.read(made.history) if line["event"] == "sent"}
    load.pending |= {message: [] for message in clicked if message not in load.pending}
    deadline, seen_at = clock.now() + CALM, clock.now()
    while (pending := load.look()) and clock.now() < min(deadline, seen_at + UNSEEN):
        for host in made.hosts.values():
            made.revive(host)
        _ask_backend(made, pending)
        if pending & _in_broker(made):
            seen_at = clock.now()
        clock.sleep(0.5)
    for message in pending & _in_broker(made):
        _left(made, "message", message, "is still in the broker")
    for server in made.place.primaries:
        with Redis(port=server.port, decode_responses=True) as client:
            for key in client.scan_iter("singleton_lock*"):
                if client.pttl(key) == -1:
                    _left(made, "key", key, "has no time to live")
    _wait_for_locks(made)
    _try_keys(made)
    if "once" in made.app.tasks:
        _try_jobs(made)


def _ask_backend(made: Scene, pending: set[str]) -> None:
    """Record the ends that it knows: a worker that was killed while it reported an end could not record it."""
    for message in pending:
        meta = made.app.backend.get_task_meta(message, cache=False)
        if meta["status"] in states.READY_STATES:
            line = {"event": "told", "message": message, **end_of(meta["result"], meta["status"])}
            appended.append(made.history, {"at": clock.now(), "host": "backend", "pid": 0, **line})


def _wait_for_locks(made: Scene) -> None:
    """Wait until nobody holds a lock except beat, which goes on."""
    deadline = clock.now() + (FREE_OF_MESSAGE if "once" in made.app.tasks else FREE)
    while held := _held(made):
        if clock.now() > deadline:
            for key in held:
                _left(made, "lock", key, "is held, and no message is under way")
            return
        clock.sleep(0.2)


def _try_keys(made: Scene) -> None:
    """Check that each hot key can still be locked once a lock that was left behind has expired."""
    began, deadline = clock.now(), clock.now() + FREE
    stuck = {*HOT}
    while stuck and clock.now() < deadline:
        for key in stuck:
            # Packages that lock when a message is sent raise if they refuse it.
            with contextlib.suppress(Exception):
                made.app.tasks["work"].apply_async((key, length_of(key)))
        clock.sleep(1)
        stuck -= {
            line["key"] for line in appended.read(made.history) if line["event"] == "start" and line["at"] > began
        }
    for key in stuck:
        _left(made, "lock", key, "cannot be had, and no message is under way")


def _try_jobs(made: Scene) -> None:
    """Check that each job can be sent, with its lock, and runs."""
    sent = {(task, key): made.app.tasks[task].apply_async((key, 0.0)) for task in SCOPED for key in JOBS}
    deadline = clock.now() + FREE
    while clock.now() < deadline:
        told = {line["message"] for line in appended.read(made.history) if line["event"] == "told"}
        if all(not isinstance(it, DuplicateResult) and it.id in told for it in sent.values()):
            return
        clock.sleep(0.5)
    for (task, key), result in sent.items():
        if isinstance(result, DuplicateResult):
            _left(made, "lock", f"{task}:{key}", f"cannot be sent, for {result.id} that is over")
        elif result.id not in told:
            _left(made, "message", result.id, "was sent when all was calm, and has no end")


def _held(made: Scene) -> list[str]:
    found = []
    for server in made.place.primaries:
        with Redis(port=server.port, decode_responses=True) as client:
            # The record of a message is not a hold, though its name may look like one.
            names = [key for key in client.scan_iter("*:run*") if ":done:" not in key]
            found += [key for key in names if "tick" not in key and "beat" not in key]
    return found


def _in_broker(made: Scene) -> set[str]:
    """Ids of the messages that wait in the queue, or in a worker."""
    with Redis(port=made.broker.port, decode_responses=True) as client:
        raw = [json.loads(line) for line in client.lrange("celery", 0, -1)]
        raw += [json.loads(line)[0] for line in client.hvals("unacked")]
    return {message["headers"]["id"] for message in raw}


def _left(made: Scene, what: str, name: str, text: str) -> None:
    line = {"at": clock.now(), "event": "left", "what": what, "name": name, "text": text}
    appended.append(made.history, line)
