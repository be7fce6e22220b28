"""Whether the lock servers, what is on them, and the workers are as the promises need them; and what to do if not.

What servers and workers say is collected elsewhere (`stores.checkup`, `remote`); here it is judged.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis import peers as remote
from celery_singleton_lock.diagnosis.audit import exclusive_tasks, has_exclusive_beat, warnings
from celery_singleton_lock.diagnosis.finding import Finding, worst_first
from celery_singleton_lock.diagnosis.keys import of_keys
from celery_singleton_lock.diagnosis.servers import (
    described,
    of_servers,
    of_watchers,
    unreachable,
)
from celery_singleton_lock.diagnosis.workers import of_workers
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys import key_of_beat, key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.options.delivery import is_rabbitmq
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.redis.probe import MAX_KEYS, Servers, no_answer
from celery_singleton_lock.stores.redis.server import words_of
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task.original import DELAYED
from celery_singleton_lock.task.publisher import Publisher


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was looked at, in words, and what was found, worst first."""

    seen: Sequence[str]
    findings: Sequence[Finding]


def diagnose(app: Any, *, pool: str, timeout: float) -> Diagnosis:
    """Look at everything that an app's locks depend on.

    Args:
        app: whose modules of tasks have been imported; its locks are not in memory.
        pool: of the workers, as `celery worker -P` calls it.
        timeout: seconds that workers get to answer.

    Raises:
        InvalidOption: a setting is wrong.
    """
    runtime = Runtime.of(app)
    settings, seen, findings = runtime.settings, [], []
    try:
        servers = Servers(settings)
    except no_answer as error:
        findings.append(unreachable(settings.backend.masked, words_of(error)))
    else:
        checkups = servers.checkups()
        seen += [described(checkup) for checkup in checkups]
        findings += of_servers(checkups, settings)
        findings += of_watchers(servers.watchers())
        for checkup in checkups:
            if checkup.error is None:
                number, found = _of_keys(servers, checkup.name, runtime.store)
                seen.append(f"{checkup.name}: {number} keys under {settings.prefix}:")
                findings += found
        servers.close()
        if any(checkup.error is None for checkup in checkups):
            findings += _tried_out(runtime.store, settings)
            leaders, found = _of_beat(app, settings, runtime.store)
            seen += leaders
            findings += found
    findings += warnings(app, settings, pool=pool)
    findings += _of_broker(app)
    peers, found = _asked(app, timeout)
    seen += [f"worker {peer.node}: {len(peer.exclusive)} exclusive tasks" for peer in peers]
    findings += found
    return Diagnosis(seen, worst_first(findings))


def _tried_out(store: Store, settings: Settings) -> Iterator[Finding]:
    """Take a lock, renew it and free it, as a task does."""
    key = key_of_text(settings.prefix, "doctor", new_owner())
    holder = Holder(node=f"doctor@{socket.gethostname()}", pid=os.getpid(), since=clock.wall())
    try:
        lease = store.acquire(LockRequest(key, new_owner(), ttl=settings.defaults["ttl"], holder=holder))
        kept = isinstance(lease, Lease) and store.renew([lease], timeout=1.0) == [True] and store.free(lease)
    except LockUnavailable as error:
        yield Finding(
            *("problem", settings.backend.masked),
            f"no lock can be taken: {error}",
            "see what is said of the servers; nodes of a Redlock that are new or came back empty need one lock_ttl",
        )
        return
    if not kept:
        yield Finding(
            *("problem", settings.backend.masked),
            "a lock was taken and was gone at once",
            "see what else deletes keys there: eviction, FLUSHALL, a failover",
        )


def _of_beat(app: Any, settings: Settings, store: Store) -> tuple[list[str], list[Finding]]:
    """Who leads beat, and what is wrong if nobody does."""
    beat = BeatSettings.from_app(app)
    try:
        leaders = [held.holder for held in store.held(key_of_beat(settings.prefix, beat.name)) if held.holder]
    except LockUnavailable as error:
        return [], [unreachable(settings.backend.masked, words_of(error))]
    if not leaders and has_exclusive_beat(app.conf) and beat.mode == "leader":
        text = f"beat_scheduler is exclusive, and no beat leads the schedule {beat.name}: nothing of it is sent"
        return [], [Finding("warning", "beat", text, "start one: celery beat -S exclusive")]
    return [f"beat: {leader.node} (pid {leader.pid}) leads the schedule {beat.name}" for leader in leaders], []


def _of_broker(app: Any) -> Iterator[Finding]:
    """Whether RabbitMQ lets messages wait that are put back."""
    if is_rabbitmq(app.conf) and (why := Publisher.of(app).prepare()) is not None:
        yield Finding(
            *("warning", "broker"),
            f"RabbitMQ gives no queue {DELAYED}.* to wait in ({why}): workers hold the messages that are put back, "
            "each in a place that another task could have",
            f"let the workers' user configure, write and read {DELAYED}.*, on RabbitMQ 3.10 or newer",
        )


def _asked(app: Any, timeout: float) -> tuple[list[remote.Peer], list[Finding]]:
    """The workers that answered, and what was found about them."""
    exclusive = [task.name for task in exclusive_tasks(app)]
    try:
        peers = remote.ask(app, timeout=timeout)
    except Exception as error:  # noqa: BLE001 - every transport has its own, and some know no remote control
        text = f"workers cannot be asked: {type(error).__name__}: {error}"
        return [], [Finding("warning", "broker", text, "see that the broker can be reached from here")]
    if not peers:
        text = f"no worker answered within {timeout:g} s"
        return [], [Finding("note", "workers", text, "start one, or ask again with a longer --timeout")]
    return peers, [*of_workers(peers, exclusive, remote.standing(app))]


def _of_keys(servers: Servers, name: str, store: Store) -> tuple[int, list[Finding]]:
    """How many keys of ours a server has, and what was found about them."""
    try:
        found_keys = list(servers.keys(name))
        found = [*of_keys(name, found_keys, store)]
    except (*no_answer, LockUnavailable) as error:
        return 0, [unreachable(name, words_of(error))]
    if len(found_keys) == MAX_KEYS:
        text = f"it has more than {MAX_KEYS:,} keys under the prefix; no more were looked at"
        found.append(Finding("note", name, text, "a shorter singleton_lock_done_ttl keeps fewer"))
    return len(found_keys), found
