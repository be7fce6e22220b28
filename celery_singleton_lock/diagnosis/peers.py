"""How the workers of an app lock, as they report through Celery's remote control, and rules for that.

Workers import this when they start, so that they know the command; so does the command that asks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from celery.app.control import Inspect
from celery.worker.control import inspect_command

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import add_method, ask_each_worker
from celery_singleton_lock.diagnosis.finding import Finding, judged, some
from celery_singleton_lock.runtime import Runtime

#: What all workers of an app must have in common: "version", "enabled", "backend", "prefix"; and the app's name, "app".
LockSetup = Mapping[str, Any]

#: An attribute that exclusive tasks have and plain ones do not.
_OURS = "tracks_started"


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that answered.

    Attributes:
        node: its node name.
        exclusive: the names of its exclusive tasks.
        plain: the names of its other tasks.
        setup: see `lock_setup`; None if it has no exclusive task, or did not answer that question.
    """

    node: str
    exclusive: frozenset[str]
    plain: frozenset[str]
    setup: LockSetup | None


def lock_setup(app: Any) -> LockSetup:
    settings = Runtime.of(app).settings
    return {
        "version": version("celery-singleton-lock"),
        "enabled": settings.enabled,
        "backend": settings.backend.masked,
        "prefix": settings.prefix,
        "app": app.main or "",
    }


@inspect_command()
def singleton_lock(state: Any, **_: Any) -> LockSetup:
    """How this worker locks its exclusive tasks."""
    return lock_setup(state.app)


def _ask_how_they_lock(self: Inspect) -> Any:
    """How the workers lock their exclusive tasks: a dictionary for each node name, None if nobody answers."""
    return ask_each_worker(self, "singleton_lock")


add_method(Inspect, "singleton_lock", _ask_how_they_lock)


def ask(app: Any, *, timeout: float) -> list[Peer]:
    """The workers that answer within `timeout` seconds, by name.

    Raises:
        kombu.exceptions.OperationalError: the broker does not answer.
    """
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)
        control = app.control.inspect(timeout=timeout, connection=connection)
        tasks = control.registered(_OURS) or {}
        # Anybody on the broker can answer, too, with anything.
        peers = {str(node): _sorted_out(names) for node, names in tasks.items() if isinstance(names, list)}
        ours = [node for node, (exclusive, _) in peers.items() if exclusive]
        # Ask only these: a worker without the command would log an error.
        control = app.control.inspect(ours, timeout=timeout, connection=connection, limit=len(ours))
        answers = (_ask_how_they_lock(control) if ours else None) or {}
    return [
        Peer(cleaned.text(node), exclusive, plain, _known(answers.get(node)))
        for node, (exclusive, plain) in sorted(peers.items())
    ]


def _sorted_out(tasks: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """A worker's exclusive tasks, and its other tasks; each text is a "name [attribute=value]"."""
    named = [cleaned.text(each).partition(" [") for each in tasks]
    exclusive = frozenset(name for name, _, attributes in named if attributes)
    return exclusive, frozenset(name for name, _, _ in named) - exclusive


def _known(answer: Any) -> LockSetup | None:
    """How a worker locks; None if it answered that it does not know the command."""
    texts = ("version", "backend", "prefix", "app")
    if not isinstance(answer, Mapping) or not answer.keys() >= {*texts, "enabled"}:
        return None
    return {**{name: cleaned.text(answer[name]) for name in texts}, "enabled": answer["enabled"]}


def of_peer(it: Peer, exclusive: frozenset[str], own: LockSetup) -> list[Finding]:
    """Differences from the asking app that could let two tasks run at once.

    Args:
        it: the worker.
        exclusive: the names of the app's exclusive tasks.
        own: how the app locks.
    """
    subject, unprotected, same = f"worker {it.node}", sorted(exclusive & it.plain), sorted(exclusive & it.exclusive)
    found = judged(
        subject,
        (
            unprotected,
            "problem",
            f"it runs {', '.join(unprotected)} without a lock: there they are not exclusive tasks",
            "deploy this app's code to it, and restart it",
        ),
        (
            it.exclusive and it.setup is None,
            "warning",
            "it has exclusive tasks but does not report how it locks them: it runs another version of "
            "celery-singleton-lock, or was too busy to answer",
            "ask again with a longer --timeout; otherwise deploy one version everywhere",
        ),
    )
    its = it.setup if it.exclusive else None
    return found if its is None else [*found, *_set_up_otherwise(subject, its, own, same)]


def _set_up_otherwise(subject: str, its: LockSetup, own: LockSetup, same: Sequence[str]) -> list[Finding]:
    return judged(
        subject,
        (
            own["enabled"] and not its["enabled"],
            "problem",
            "it runs exclusive tasks without a lock: singleton_lock_enabled is False there",
            "restart it without --singleton-lock-disable, and without that setting",
        ),
        (
            its["prefix"] != own["prefix"],
            "problem",
            f"its locks have the prefix {its['prefix']!r}, those of this app {own['prefix']!r}: they do not "
            "see each other",
            "give all workers of this app one singleton_lock_prefix",
        ),
        (
            its["backend"] != own["backend"],
            "warning",
            f"it keeps its locks at {its['backend']}, this app at {own['backend']}: unless these are two "
            "names of one server, they do not exclude each other",
            "give all workers of this app one singleton_lock_backend",
        ),
        (
            its["version"] != own["version"],
            "warning",
            f"it runs celery-singleton-lock {its['version']}, but this is {own['version']}",
            "deploy one version everywhere",
        ),
        (
            same and its["app"] != own["app"] and its["prefix"] == own["prefix"],
            "note",
            f"it runs the app {its['app']!r}, this one is {own['app']!r}: {some(same)} of both have the same locks",
            "if these are two projects, give each its own singleton_lock_prefix",
        ),
    )
