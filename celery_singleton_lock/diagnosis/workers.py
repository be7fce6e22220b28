"""What sets the workers of an app apart from it, and so may let two of them run what only one may."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from celery_singleton_lock.diagnosis.finding import Finding
from celery_singleton_lock.diagnosis.peers import Peer, Standing


def of_workers(peers: Sequence[Peer], exclusive: Iterable[str], own: Standing) -> Iterator[Finding]:
    """What sets workers apart from this app.

    Args:
        peers: the workers that answered.
        exclusive: the names of this app's exclusive tasks.
        own: how this app locks.
    """
    names = frozenset(exclusive)
    for peer in peers:
        subject = f"worker {peer.node}"
        if unprotected := sorted(names & peer.plain):
            yield Finding(
                *("problem", subject),
                f"it runs {', '.join(unprotected)} without a lock: these are no exclusive tasks there",
                "deploy the code that this app has to it, and restart it",
            )
        if not peer.exclusive:
            continue
        if peer.standing is None:
            yield Finding(
                *("warning", subject),
                "it has exclusive tasks and does not say how it locks them: it runs another version of "
                "celery-singleton-lock, or was too busy to answer",
                "ask again with a longer --timeout; else deploy one version everywhere",
            )
            continue
        yield from _of_standing(subject, peer.standing, own)


def _of_standing(subject: str, its: Standing, own: Standing) -> Iterator[Finding]:
    if not its["enabled"] and own["enabled"]:
        yield Finding(
            *("problem", subject),
            "it runs exclusive tasks without a lock: singleton_lock_enabled is False there",
            "restart it without --singleton-lock-disable, and without that setting",
        )
    if its["prefix"] != own["prefix"]:
        yield Finding(
            *("problem", subject),
            f"its locks have the prefix {its['prefix']!r}, those of this app {own['prefix']!r}: neither sees the "
            "other's",
            "give all workers of this app one singleton_lock_prefix",
        )
    if its["backend"] != own["backend"]:
        yield Finding(
            *("warning", subject),
            f"it keeps its locks at {its['backend']}, this app at {own['backend']}: unless that is one server by two "
            "names, they exclude nothing of each other",
            "give all workers of this app one singleton_lock_backend",
        )
    if its["version"] != own["version"]:
        yield Finding(
            *("warning", subject),
            f"it runs celery-singleton-lock {its['version']}, this is {own['version']}",
            "deploy one version everywhere",
        )
