"""Rules for the workers that answer: differences from the app that could let two tasks run at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celery_singleton_lock.diagnosis.finding import Finding, Subject, some
from celery_singleton_lock.diagnosis.peers import LockSetup, Peer


@dataclass(frozen=True, slots=True)
class WorkerContext(Subject):
    """A worker, and the asking app: the names of the app's exclusive tasks, and how it locks."""

    peer: Peer
    exclusive: frozenset[str]
    own: LockSetup


def _unprotected(it: WorkerContext) -> Iterator[Finding]:
    if unprotected := sorted(it.exclusive & it.peer.plain):
        yield it.problem(
            f"it runs {', '.join(unprotected)} without a lock: there they are not exclusive tasks",
            "deploy this app's code to it, and restart it",
        )


def _unknown(it: WorkerContext) -> Iterator[Finding]:
    if it.peer.exclusive and it.peer.setup is None:
        yield it.warning(
            "it has exclusive tasks but does not report how it locks them: it runs another version of "
            "celery-singleton-lock, or was too busy to answer",
            "ask again with a longer --timeout; otherwise deploy one version everywhere",
        )


def _set_up_otherwise(it: WorkerContext) -> Iterator[Finding]:
    its, own = it.peer.setup, it.own
    if its is None or not it.peer.exclusive:
        return
    if not its["enabled"] and own["enabled"]:
        yield it.problem(
            "it runs exclusive tasks without a lock: singleton_lock_enabled is False there",
            "restart it without --singleton-lock-disable, and without that setting",
        )
    if its["prefix"] != own["prefix"]:
        yield it.problem(
            f"its locks have the prefix {its['prefix']!r}, those of this app {own['prefix']!r}: they do not "
            "see each other",
            "give all workers of this app one singleton_lock_prefix",
        )
    if its["backend"] != own["backend"]:
        yield it.warning(
            f"it keeps its locks at {its['backend']}, this app at {own['backend']}: unless these are two "
            "names of one server, they do not exclude each other",
            "give all workers of this app one singleton_lock_backend",
        )
    if its["version"] != own["version"]:
        yield it.warning(
            f"it runs celery-singleton-lock {its['version']}, but this is {own['version']}",
            "deploy one version everywhere",
        )


def _of_another_app(it: WorkerContext) -> Iterator[Finding]:
    its, own, same = it.peer.setup, it.own, sorted(it.exclusive & it.peer.exclusive)
    if its is not None and same and its["app"] != own["app"] and its["prefix"] == own["prefix"]:
        yield it.note(
            f"it runs the app {its['app']!r}, this one is {own['app']!r}: {some(same)} of both have the same locks",
            "if these are two projects, give each its own singleton_lock_prefix",
        )


RULES = (_unprotected, _unknown, _set_up_otherwise, _of_another_app)
