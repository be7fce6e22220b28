"""Applies the rules to everything that an app's locks depend on: servers, keys, settings, beat, the broker, workers.

`stores.redis.probe` and `peers` collect what servers and workers report; this module applies the rules to it.
"""

from __future__ import annotations

import os
import socket
from typing import Any, NamedTuple

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis import peers
from celery_singleton_lock.diagnosis.audit import of_app
from celery_singleton_lock.diagnosis.finding import Finding, judged, worst_first
from celery_singleton_lock.diagnosis.held import held_locks
from celery_singleton_lock.diagnosis.servers import in_words, of_locks, of_sentinels, of_servers, unusable
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_text, name_of_beat, shown_name
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.app import BeatSettings, Settings, is_rabbitmq
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.redis.probe import NO_ANSWER, Servers
from celery_singleton_lock.stores.redis.server import words_of
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task.putback import Publisher

#: In the error of a lock whose user lacks rights: a server's own, and those of a script on Redis 6 and 7.
_LACKS_RIGHTS = "NoPermissionError", "needs the right", "can't run this command", "ACL failure"


class Diagnosis(NamedTuple):
    """Everything that was checked, in words, and the findings, worst first."""

    seen: list[str]
    findings: list[Finding]


def diagnose(app: Any, *, timeout: float) -> Diagnosis:
    """Check everything that an app's locks depend on.

    Args:
        app: the app; its task modules have been imported, and its locks are not in memory.
        timeout: the seconds that workers have to answer.

    Raises:
        InvalidOption: a setting is wrong.
    """
    runtime, found = Runtime.of(app), Diagnosis([], [])
    beats = None
    if _look_at_servers(found, runtime):
        found.findings.extend(_tried_out(runtime.store, runtime.settings))
        beats = _look_at_locks(found, app, runtime)
    found.findings.extend(of_app(app, runtime.settings, beats=beats))
    found.findings.extend(_rights_on_rabbitmq(app))
    _ask_workers(found, app, timeout)
    return found._replace(findings=worst_first(found.findings))


def _look_at_servers(found: Diagnosis, runtime: Runtime) -> bool:
    """Check the servers; whether any of them answers."""
    settings = runtime.settings
    try:
        servers = Servers(settings)
    except NO_ANSWER as error:
        found.findings.append(unusable(settings.backend.masked, words_of(error)))
        return False
    probes = servers.probes()
    found.seen.extend(map(in_words, probes))
    found.findings.extend(of_servers(probes, settings))
    found.findings.extend(of_sentinels(servers.sentinels()))
    servers.close()
    return any(probe.error is None for probe in probes)


def _tried_out(store: Store, settings: Settings) -> list[Finding]:
    """Take a lock, renew it and free it, as a task does."""
    key, refusal, kept = key_of_text(settings.prefix, "doctor", new_owner()), "", False
    holder = Holder(node=f"doctor@{socket.gethostname()}", pid=os.getpid(), since=clock.wall())
    try:
        lease = store.acquire(LockRequest(key, new_owner(), ttl=settings.defaults["ttl"], holder=holder))
        kept = isinstance(lease, Lease) and store.renew([lease], timeout=1.0) == [True] and bool(store.free(lease))
    except LockUnavailable as error:
        refusal = str(error)
    remedy = "read the findings about the servers; nodes of a Redlock that are new or came back empty need one lock_ttl"
    if any(words in refusal for words in _LACKS_RIGHTS):
        # Without the user's name: in a URL without a colon, the text that was meant as the password is the user.
        remedy = f"ACL SETUSER <its user> ~{settings.prefix}:* +@read +@write +@scripting +time"
    return judged(
        settings.backend.masked,
        (
            refusal,
            "problem",
            f"no lock can be taken: {refusal}",
            remedy,
        ),
        (
            not (kept or refusal),
            "problem",
            "a lock was taken and was gone at once",
            "find out what else deletes keys there: eviction, FLUSHALL, a failover",
        ),
    )


def _look_at_locks(found: Diagnosis, app: Any, runtime: Runtime) -> int | None:
    """Check what is held; how many beats send the schedule, None if unknown."""
    name, settings = BeatSettings.from_app(app).name, runtime.settings
    try:
        locks = held_locks(runtime.store, settings.prefix)
    except LockUnavailable as error:
        found.findings.append(unusable(settings.backend.masked, words_of(error)))
        return None
    beats = [lock for lock in locks if lock.name == shown_name(name_of_beat(name))]
    found.seen.append(f"{len(locks)} locks are held under the prefix {settings.prefix}")
    found.seen.extend(f"beat: {it.holder.place} sends the schedule {name}" for it in beats)
    found.findings.extend(of_locks(locks))
    return len(beats)


def _rights_on_rabbitmq(app: Any) -> list[Finding]:
    """Whether RabbitMQ takes messages that are put back."""
    if not is_rabbitmq(app.conf):
        return []
    refusal = Publisher.of(app).refusal()
    return judged(
        "broker",
        (
            refusal is not None,
            "warning",
            f"RabbitMQ takes no messages by the name of their queue ({refusal}): those that are put back go through "
            "the exchange that they came by, and only if no other queue gets them from there; others keep their slot",
            "let the workers' user write to amq.default: rabbitmqctl set_permissions -p <vhost> <user> <configure> "
            "'^(<as before>|amq\\.default$)' <read>",
        ),
    )


def _ask_workers(found: Diagnosis, app: Any, timeout: float) -> None:
    try:
        answering = peers.ask(app, timeout=timeout)
    except Exception as error:  # noqa: BLE001 - every transport has its own errors, and some have no remote control
        text = f"workers cannot be asked: {type(error).__name__}: {error}"
        found.findings.append(Finding("warning", "broker", text, "check that the broker can be reached from here"))
        return
    nobody, remedy = f"no worker answered within {timeout:g} s", "start one, or ask again with a longer --timeout"
    found.findings.extend(judged("workers", (not answering, "note", nobody, remedy)))
    found.seen.extend([f"worker {peer.node}: {len(peer.exclusive)} exclusive tasks" for peer in answering])
    exclusive, own = frozenset(task.name for task in exclusive_tasks(app)), peers.lock_setup(app)
    found.findings.extend([finding for peer in answering for finding in peers.of_peer(peer, exclusive, own)])
