"""Rules for the lock servers: each server, the nodes of a Redlock together, and the Sentinels; and for what is held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding, Rule, judged, merged
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.options.app import Settings

if TYPE_CHECKING:  # A starting worker needs no client before its first lock.
    from celery_singleton_lock.stores.redis.probe import Probe, SentinelProbe

#: The oldest server version on which the locks work.
MIN_VERSION = (6, 2)

#: The number of slots of a cluster.
SLOTS = 16_384

#: Seconds by which clocks may differ without a finding.
MAX_DRIFT = 1.0

#: The share of a server's memory that may be used without a finding.
MAX_USED = 0.9

_CREDENTIALS = "correct the user and the password in singleton_lock_backend"

#: What to do about an error with which the server answered, by its type.
_REFUSALS = {
    "AuthenticationError": _CREDENTIALS,
    "AuthenticationWrongNumberOfArgsError": _CREDENTIALS,
    "AuthorizationError": _CREDENTIALS,
    "HELLO": "write redis+cluster:// (with TLS rediss+cluster://) there, without the number of a database",
    "BusyLoadingError": "wait until it has loaded its data",
    "NoPermissionError": "give its user the rights that docs/security.md lists",
    "OutOfMemoryError": "give it more memory, or find out what fills it",
    "ReadOnlyError": "name the master in singleton_lock_backend, or the Sentinels (sentinel://)",
    "ResponseError": "correct singleton_lock_backend, such as the number of its database, or see the server's log",
}

_SYNCHRONIZE = "let NTP set the clocks of all hosts"


def in_words(probe: Probe) -> str:
    """A server, in one line."""
    if probe.error is not None:
        answer = "refused to serve" if probe.error.partition(":")[0] in _REFUSALS else "no answer"
        return f"{probe.name}: {answer}"
    if probe.info is None:
        return f"{probe.name}: answers"
    version = ".".join(map(str, probe.version or ()))
    ahead = "" if probe.ahead is None else f", clock {probe.ahead:+.3f} s"
    replicas = probe.number("connected_slaves")
    return (
        f"{probe.name}: {probe.info.get('server_name', 'redis')} {version}, {probe.info.get('role', '?')}, "
        f"{replicas} replicas, maxmemory-policy {probe.info.get('maxmemory_policy', '?')}{ahead}"
    )


def of_servers(probes: Sequence[Probe], settings: Settings) -> list[Finding]:
    """Findings about each server, and about all of them together."""
    is_redlock = settings.backend.kind is Kind.REDLOCK
    silent = [unusable(it.name, it.error, is_one_of_many=is_redlock) for it in probes if it.error is not None]
    answering = [finding for it in probes if it.error is None for finding in _of_server(it, settings)]
    return [*silent, *answering, *(_one_server_twice(probes) if is_redlock else ())]


def unusable(name: str, error: str, *, is_one_of_many: bool = False) -> Finding:
    """A server that does not answer, or refuses to serve; `error` is the error of its `Probe`."""
    kind = error.partition(":")[0]
    text = f"it answered: {error}" if kind in _REFUSALS else f"it does not answer: {error}"
    remedy = _REFUSALS.get(
        kind, "start it, or correct host, port and TLS (rediss://) in singleton_lock_backend; check the network"
    )
    if is_one_of_many:
        return Finding("warning", name, f"{text} (the locks need most of the nodes)", remedy)
    return Finding("problem", name, text, remedy)


def _of_server(it: Probe, settings: Settings) -> list[Finding]:
    info, cluster, kind = it.info or {}, it.cluster or {}, settings.backend.kind
    state, slots = cluster.get("cluster_state"), cluster.get("cluster_slots_ok")
    votes_at_once = kind is Kind.REDLOCK and settings.transport_options.get("restart_delay") is False
    ahead = it.ahead or 0.0
    return judged(
        it.name,
        (
            it.info is None or it.ahead is None,
            "note",
            "its user may not run INFO or TIME: version, eviction, replicas and clock could not be checked",
            "run the doctor as a user with more rights (+info +time), by another singleton_lock_backend",
        ),
        (
            it.version is not None and it.version < MIN_VERSION,
            "problem",
            f"it is version {info.get('redis_version')}; the locks need {'.'.join(map(str, MIN_VERSION))} or newer",
            "upgrade it",
        ),
        (
            info and info.get("role") != "master",
            "problem",
            "it is a replica: it grants no locks, and its data may be old",
            "name the master in singleton_lock_backend, or the Sentinels (sentinel://)",
        ),
        (
            cluster and (state, slots) != ("ok", str(SLOTS)),
            "problem",
            f"its cluster is in the state {state!r}, with {slots} of {SLOTS} slots working: locks in the "
            "others cannot be taken",
            "check CLUSTER NODES, and bring back what has failed",
        ),
        *_of_memory(it, info.get("maxmemory_policy", "noeviction")),
        (
            info and votes_at_once and info.get("aof_enabled") != "1",
            "problem",
            "it keeps nothing on disk, and may vote as soon as it is back ('restart_delay' is False): a "
            "restart of two nodes can grant one lock twice",
            "remove restart_delay from singleton_lock_transport_options, or set appendonly yes, appendfsync always",
        ),
        (
            info and kind is Kind.SENTINEL and not it.number("connected_slaves"),
            "warning",
            "no replica is linked to it: it cannot fail over",
            "start the replicas",
        ),
        (
            abs(ahead) - it.uncertain > MAX_DRIFT,
            "warning",
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's. Leases do not "
            "depend on that; fencing tokens do after a server has lost its keys, and so does what beat sends",
            _SYNCHRONIZE,
        ),
    )


def _of_memory(it: Probe, policy: str) -> tuple[Rule, ...]:
    limit, used, evicted = (it.number(name) for name in ("maxmemory", "used_memory", "evicted_keys"))
    drops = "any key" if policy.startswith("allkeys") else "keys with a time to live, as all locks have"
    so_far = f" (it has dropped {evicted} keys since its start)" if evicted else ""
    return (
        (
            policy != "noeviction" and limit,
            "problem",
            f"maxmemory-policy is {policy}: when its memory is full, it drops {drops}{so_far}; one "
            "lock may then have two holders",
            "CONFIG SET maxmemory-policy noeviction, or use a separate server for the locks",
        ),
        (
            policy == "noeviction" and limit and used > MAX_USED * limit,
            "warning",
            f"{used / max(limit, 1):.0%} of its memory is used, and it drops nothing: once it is full, no lock can be "
            "taken",
            "raise maxmemory, or lower singleton_lock_done_ttl",
        ),
    )


def _one_server_twice(probes: Sequence[Probe]) -> Iterator[Finding]:
    by_identity: defaultdict[str, list[str]] = defaultdict(list)
    for probe in probes:
        if identity := (probe.info or {}).get("run_id"):
            by_identity[identity].append(probe.name)
    for first, *others in by_identity.values():
        text = f"it is the same server as {', '.join(others)}: if it fails, several votes are lost"
        yield from judged(first, (others, "problem", text, "name independent servers in singleton_lock_backend"))


def of_sentinels(sentinels: Sequence[SentinelProbe]) -> list[Finding]:
    masters = sorted({sentinel.master for sentinel in sentinels if sentinel.master})
    disagree = judged(
        "Sentinels",
        (
            len(masters) > 1,
            "warning",
            f"they disagree about the master: {', '.join(masters)}",
            "wait for the end of the failover; if there is none, they monitor different servers under one name",
        ),
    )
    return [*(finding for sentinel in sentinels for finding in _of_sentinel(sentinel)), *disagree]


def _of_sentinel(it: SentinelProbe) -> list[Finding]:
    return judged(
        f"Sentinel {it.name}",
        (
            it.error is not None,
            "warning",
            f"it does not answer: {it.error}",
            "start it, or correct singleton_lock_backend: a failover needs most of them",
        ),
        (
            it.error is None and it.master is None,
            "problem",
            "it does not know a master of this name",
            "correct 'master_name' in singleton_lock_transport_options, or what the Sentinel monitors",
        ),
    )


def of_locks(locks: Iterable[HeldLock]) -> list[Finding]:
    """Findings about locks that are held."""
    return merged(finding for lock in locks for finding in _of_lock(lock))


def _of_lock(lock: HeldLock) -> list[Finding]:
    return judged(
        lock.key,
        (
            lock.held.holder is None,
            "warning",
            "it has a value that this package did not write: until that is deleted, nobody can take the lock",
            "find out who wrote it, or delete it in Redis: DEL '<key>:run'",
        ),
        (
            lock.is_left_behind,
            "warning",
            "its holder is gone, a process of this host",
            "wait for its end, start its worker again, which frees it, or run celery locks release",
        ),
        (
            lock.expires_in is None,
            "problem",
            "it has no time to live, though everything that this package writes has one: it stays forever",
            "if no task holds it, delete it in Redis: DEL '<key>:run'",
        ),
    )
