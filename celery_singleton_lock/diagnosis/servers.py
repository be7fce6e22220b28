"""What is wrong with the lock servers, each for itself and all together."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.stores.redis.probe import Checkup, Watcher

#: The oldest server that the locks work on.
MIN_VERSION = (6, 2)

#: Slots of a cluster.
SLOTS = 16_384

#: Seconds by which clocks may differ before that is worth a word.
MAX_DRIFT = 1.0

#: The share of a server's memory that may be used before that is worth a word.
MAX_USED = 0.9


def described(checkup: Checkup) -> str:
    """A server, in words."""
    if checkup.error is not None:
        return f"{checkup.name}: no answer"
    if checkup.info is None:
        return f"{checkup.name}: answers"
    version = ".".join(map(str, checkup.version or ()))
    ahead = "" if checkup.ahead is None else f", clock {checkup.ahead:+.3f} s"
    replicas = checkup.number("connected_slaves")
    return (
        f"{checkup.name}: {checkup.info.get('server_name', 'redis')} {version}, {checkup.info.get('role', '?')}, "
        f"{replicas} replicas, maxmemory-policy {checkup.info.get('maxmemory_policy', '?')}{ahead}"
    )


def of_servers(checkups: Sequence[Checkup], settings: Settings) -> Iterator[Finding]:
    """What is wrong with the servers, one by one and together."""
    is_redlock = settings.backend.kind is Kind.REDLOCK
    for checkup in checkups:
        if checkup.error is not None:
            yield unreachable(checkup.name, checkup.error, is_one_of_many=is_redlock)
            continue
        yield from _of_permissions(checkup, settings)
        if checkup.info is not None:
            yield from _of_server(checkup)
            yield from _of_loss(checkup, settings, is_redlock=is_redlock)
    yield from _of_clocks(checkups)
    if is_redlock:
        yield from _of_one_twice(checkups)


def of_watchers(watchers: Sequence[Watcher]) -> Iterator[Finding]:
    """What is wrong with the Sentinels."""
    masters = {watcher.master for watcher in watchers if watcher.master}
    for watcher in watchers:
        if watcher.error is not None:
            yield Finding(
                *("warning", f"Sentinel {watcher.name}"),
                f"it does not answer: {watcher.error}",
                "start it, or correct singleton_lock_backend: a failover needs most of them",
            )
        elif watcher.master is None:
            yield Finding(
                *("problem", f"Sentinel {watcher.name}"),
                "it does not know a master of this name",
                "correct 'master_name' in singleton_lock_transport_options, or what the Sentinel monitors",
            )
    if len(masters) > 1:
        yield Finding(
            *("warning", "Sentinels"),
            f"they take different servers for the master: {', '.join(sorted(map(str, masters)))}",
            "wait for the end of the failover; if there is none, they monitor different servers under one name",
        )


def unreachable(name: str, error: str, *, is_one_of_many: bool = False) -> Finding:
    """A server that does not answer."""
    text = f"it does not answer: {error}"
    if is_one_of_many:
        return Finding("warning", name, f"{text} (the locks need most of the nodes)", "start it, or see to the network")
    remedy = "start it, or correct singleton_lock_backend, its user and password; see that this host may reach it"
    return Finding("problem", name, text, remedy)


def _of_permissions(checkup: Checkup, settings: Settings) -> Iterator[Finding]:
    # Not by its name: in a URL without a colon, what was meant as the password is the user.
    user = f"ACL SETUSER <its user> ~{settings.prefix}:*"
    if checkup.refused:
        yield Finding(
            *("problem", checkup.name),
            f"its user may not run {', '.join(checkup.refused)} on {settings.prefix}:*",
            f"{user} +@read +@write +@scripting",
        )
    if "WAIT" in checkup.refused_extras and settings.replicas:
        yield Finding(
            *("problem", checkup.name),
            "its user may not run WAIT, which singleton_lock_replicas needs",
            f"{user} +wait",
        )
    if checkup.info is None or checkup.ahead is None:
        yield Finding(
            *("note", checkup.name),
            "its user may not run INFO or TIME: version, eviction, replicas and clock could not be looked at",
            "run the doctor as a user who may (+info +time), by another singleton_lock_backend",
        )


def _of_server(checkup: Checkup) -> Iterator[Finding]:
    info = checkup.info or {}
    if checkup.version is not None and checkup.version < MIN_VERSION:
        yield Finding(
            *("problem", checkup.name),
            f"it is version {info.get('redis_version')}; the locks need {'.'.join(map(str, MIN_VERSION))} or newer",
            "upgrade it",
        )
    if info.get("role") != "master":
        yield Finding(
            *("problem", checkup.name),
            "it is a replica: it takes no locks, and what it has may be old",
            "name the master in singleton_lock_backend, or the Sentinels (sentinel://)",
        )
    cluster = checkup.cluster or {}
    if cluster and (cluster.get("cluster_state"), cluster.get("cluster_slots_ok")) != ("ok", str(SLOTS)):
        yield Finding(
            *("problem", checkup.name),
            f"its cluster is in the state {cluster.get('cluster_state')!r}, with {cluster.get('cluster_slots_ok')} of "
            f"{SLOTS} slots well: locks in the others cannot be taken",
            "see CLUSTER NODES, and bring back what has failed",
        )
    yield from _of_memory(checkup)


def _of_memory(checkup: Checkup) -> Iterator[Finding]:
    policy = (checkup.info or {}).get("maxmemory_policy", "noeviction")
    limit, used, evicted = (checkup.number(name) for name in ("maxmemory", "used_memory", "evicted_keys"))
    if policy != "noeviction":
        drops = "any key" if policy.startswith("allkeys") else "keys that have a time to live, as all locks have"
        so_far = f" (it has dropped {evicted} keys since its start)" if evicted else ""
        yield Finding(
            "problem" if limit else "note",
            checkup.name,
            f"maxmemory-policy is {policy}: with its memory full it drops {drops}{so_far}; two may hold one lock then"
            + ("" if limit else " (maxmemory is not set, so that is never)"),
            "CONFIG SET maxmemory-policy noeviction, or a server of its own for the locks",
        )
    elif limit and used > MAX_USED * limit:
        yield Finding(
            *("warning", checkup.name),
            f"{used / limit:.0%} of its memory is used, and it drops nothing: when it is full, no lock can be taken",
            "raise maxmemory, or lower singleton_lock_done_ttl",
        )


def _of_loss(checkup: Checkup, settings: Settings, *, is_redlock: bool) -> Iterator[Finding]:
    """What of it a restart or a failover forgets."""
    replicas, wanted = checkup.number("connected_slaves"), settings.replicas
    keeps = (checkup.info or {}).get("aof_enabled") == "1"
    if is_redlock:
        if settings.transport_options.get("restart_delay") is False and not keeps:
            yield Finding(
                *("problem", checkup.name),
                "it keeps nothing on disk and may vote as soon as it is back ('restart_delay' is False): a restart of "
                "two nodes can give one lock twice",
                "remove restart_delay from singleton_lock_transport_options, or set appendonly yes, appendfsync always",
            )
        return
    if wanted > replicas:
        yield Finding(
            *("problem", checkup.name),
            f"singleton_lock_replicas is {wanted}, and it has {replicas}: no lock counts as taken",
            "start replicas, or lower singleton_lock_replicas",
        )
    elif replicas and not wanted:
        yield Finding(
            *("note", checkup.name),
            f"it has {replicas} replicas, and singleton_lock_replicas is 0: a failover may forget the latest locks",
            "set singleton_lock_replicas to 1, or use a Redlock",
        )
    elif not replicas and settings.backend.kind is Kind.SENTINEL:
        yield Finding(
            *("warning", checkup.name),
            "no replica is linked to it: there is nothing to fail over to",
            "start the replicas",
        )
    if not keeps and not replicas:
        yield Finding(
            *("note", checkup.name),
            "it keeps nothing on disk at once (appendonly no): a restart forgets locks, whose holders are stopped at "
            "their next renewal, and what messages were carried out",
            "set appendonly yes, or use a Redlock",
        )


def _of_clocks(checkups: Sequence[Checkup]) -> Iterator[Finding]:
    known = [checkup for checkup in checkups if checkup.ahead is not None]
    for checkup in known:
        ahead = checkup.ahead or 0.0
        if abs(ahead) - checkup.uncertain > MAX_DRIFT:
            yield Finding(
                *("warning", checkup.name),
                f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's. Leases do not "
                "depend on that; fencing tokens do after a server has lost its keys, and so does what beat sends",
                "let NTP set the clocks of all hosts",
            )
    for one, other in itertools.combinations(known, 2):
        apart = abs((one.ahead or 0.0) - (other.ahead or 0.0))
        if apart - one.uncertain - other.uncertain > MAX_DRIFT:
            yield Finding(
                *("warning", one.name),
                f"its clock and that of {other.name} are {apart:.1f} s apart",
                "let NTP set the clocks of all hosts",
            )


def _of_one_twice(checkups: Sequence[Checkup]) -> Iterator[Finding]:
    by_identity: defaultdict[str, list[str]] = defaultdict(list)
    for checkup in checkups:
        if identity := (checkup.info or {}).get("run_id"):
            by_identity[identity].append(checkup.name)
    for names in by_identity.values():
        if len(names) > 1:
            yield Finding(
                *("problem", names[0]),
                f"it is the same server as {', '.join(names[1:])}: one that fails takes several votes with it",
                "name servers in singleton_lock_backend that are independent of each other",
            )
