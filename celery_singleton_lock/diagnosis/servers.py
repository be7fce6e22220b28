"""Rules for the lock servers: for each server, for the nodes of a Redlock together, and for the Sentinels."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding, Subject, judged
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


@dataclass(frozen=True, slots=True)
class ServerContext(Subject):
    """A server that answers, and the settings with which it is used."""

    probe: Probe
    settings: Settings

    @property
    def info(self) -> Mapping[str, str]:
        """The answer to INFO; empty if the user has no right to it."""
        return self.probe.info or {}

    @property
    def is_node(self) -> bool:
        """Whether it is a node of a Redlock."""
        return self.settings.backend.kind is Kind.REDLOCK

    @property
    def keeps(self) -> bool:
        """Whether it keeps its data across a restart."""
        return self.info.get("aof_enabled") == "1"


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
    answering = [ServerContext(it.name, it, settings) for it in probes if it.error is None]
    together = (_clocks_apart, _one_server_twice) if is_redlock else (_clocks_apart,)
    return [*silent, *judged(RULES, *answering), *judged(together, probes)]


def of_sentinels(sentinels: Sequence[SentinelProbe]) -> list[Finding]:
    return judged((_sentinels_that_do_not_help, _sentinels_that_disagree), sentinels)


def unusable(name: str, error: str, *, is_one_of_many: bool = False) -> Finding:
    """A server that does not answer, or refuses to serve; `error` is the error of its `Probe`."""
    kind = error.partition(":")[0]
    if kind not in _REFUSALS:
        text = f"it does not answer: {error}"
        remedy = "start it, or correct host, port and TLS (rediss://) in singleton_lock_backend; check the network"
    else:
        text, remedy = f"it answered: {error}", _REFUSALS[kind]
    if is_one_of_many:
        return Subject(name).warning(f"{text} (the locks need most of the nodes)", remedy)
    return Subject(name).problem(text, remedy)


def _missing_rights(it: ServerContext) -> Iterator[Finding]:
    # Without the user's name: in a URL without a colon, the text that was meant as the password is the user.
    user, prefix = f"ACL SETUSER <its user> ~{it.settings.prefix}:*", it.settings.prefix
    if it.probe.refused:
        refused = ", ".join(it.probe.refused)
        yield it.problem(f"its user may not run {refused} on {prefix}:*", f"{user} +@read +@write +@scripting")


def _not_looked_at(it: ServerContext) -> Iterator[Finding]:
    if it.probe.info is None or it.probe.ahead is None:
        yield it.note(
            "its user may not run INFO or TIME: version, eviction, replicas and clock could not be checked",
            "run the doctor as a user with more rights (+info +time), by another singleton_lock_backend",
        )


def _too_old(it: ServerContext) -> Iterator[Finding]:
    if it.probe.version is not None and it.probe.version < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        version = it.info.get("redis_version")
        yield it.problem(f"it is version {version}; the locks need {needed} or newer", "upgrade it")


def _a_replica(it: ServerContext) -> Iterator[Finding]:
    if it.info and it.info.get("role") != "master":
        yield it.problem(
            "it is a replica: it grants no locks, and its data may be old",
            "name the master in singleton_lock_backend, or the Sentinels (sentinel://)",
        )


def _slots_that_nobody_serves(it: ServerContext) -> Iterator[Finding]:
    cluster = it.probe.cluster or {}
    state, slots = cluster.get("cluster_state"), cluster.get("cluster_slots_ok")
    if cluster and (state, slots) != ("ok", str(SLOTS)):
        yield it.problem(
            f"its cluster is in the state {state!r}, with {slots} of {SLOTS} slots working: locks in the "
            "others cannot be taken",
            "check CLUSTER NODES, and bring back what has failed",
        )


def _memory(it: ServerContext) -> Iterator[Finding]:
    policy = it.info.get("maxmemory_policy", "noeviction")
    limit, used, evicted = (it.probe.number(name) for name in ("maxmemory", "used_memory", "evicted_keys"))
    if policy != "noeviction" and limit:
        drops = "any key" if policy.startswith("allkeys") else "keys with a time to live, as all locks have"
        so_far = f" (it has dropped {evicted} keys since its start)" if evicted else ""
        yield it.problem(
            f"maxmemory-policy is {policy}: when its memory is full, it drops {drops}{so_far}; one "
            "lock may then have two holders",
            "CONFIG SET maxmemory-policy noeviction, or use a separate server for the locks",
        )
    elif limit and used > MAX_USED * limit:
        yield it.warning(
            f"{used / limit:.0%} of its memory is used, and it drops nothing: once it is full, no lock can be taken",
            "raise maxmemory, or lower singleton_lock_done_ttl",
        )


def _forgetful_node(it: ServerContext) -> Iterator[Finding]:
    votes_at_once = it.settings.transport_options.get("restart_delay") is False
    if it.info and it.is_node and votes_at_once and not it.keeps:
        yield it.problem(
            "it keeps nothing on disk, and may vote as soon as it is back ('restart_delay' is False): a "
            "restart of two nodes can grant one lock twice",
            "remove restart_delay from singleton_lock_transport_options, or set appendonly yes, appendfsync always",
        )


def _replicas(it: ServerContext) -> Iterator[Finding]:
    if it.is_node or not it.info:
        return
    replicas = it.probe.number("connected_slaves")
    if not replicas and it.settings.backend.kind is Kind.SENTINEL:
        yield it.warning("no replica is linked to it: it cannot fail over", "start the replicas")


def _wrong_clock(it: ServerContext) -> Iterator[Finding]:
    ahead = it.probe.ahead or 0.0
    if abs(ahead) - it.probe.uncertain > MAX_DRIFT:
        yield it.warning(
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's. Leases do not "
            "depend on that; fencing tokens do after a server has lost its keys, and so does what beat sends",
            _SYNCHRONIZE,
        )


RULES = (
    _missing_rights,
    _not_looked_at,
    _too_old,
    _a_replica,
    _slots_that_nobody_serves,
    _memory,
    _forgetful_node,
    _replicas,
    _wrong_clock,
)


def _clocks_apart(probes: Sequence[Probe]) -> Iterator[Finding]:
    known = [probe for probe in probes if probe.ahead is not None]
    for one, other in itertools.combinations(known, 2):
        apart = abs((one.ahead or 0.0) - (other.ahead or 0.0))
        if apart - one.uncertain - other.uncertain > MAX_DRIFT:
            yield Subject(one.name).warning(f"its clock and that of {other.name} are {apart:.1f} s apart", _SYNCHRONIZE)


def _one_server_twice(probes: Sequence[Probe]) -> Iterator[Finding]:
    by_identity: defaultdict[str, list[str]] = defaultdict(list)
    for probe in probes:
        if identity := (probe.info or {}).get("run_id"):
            by_identity[identity].append(probe.name)
    for first, *others in by_identity.values():
        if others:
            yield Subject(first).problem(
                f"it is the same server as {', '.join(others)}: if it fails, several votes are lost",
                "name independent servers in singleton_lock_backend",
            )


def _sentinels_that_do_not_help(sentinels: Sequence[SentinelProbe]) -> Iterator[Finding]:
    for sentinel in sentinels:
        if sentinel.error is not None:
            yield Subject(f"Sentinel {sentinel.name}").warning(
                f"it does not answer: {sentinel.error}",
                "start it, or correct singleton_lock_backend: a failover needs most of them",
            )
        elif sentinel.master is None:
            yield Subject(f"Sentinel {sentinel.name}").problem(
                "it does not know a master of this name",
                "correct 'master_name' in singleton_lock_transport_options, or what the Sentinel monitors",
            )


def _sentinels_that_disagree(sentinels: Sequence[SentinelProbe]) -> Iterator[Finding]:
    masters = sorted({sentinel.master for sentinel in sentinels if sentinel.master})
    if len(masters) > 1:
        yield Subject("Sentinels").warning(
            f"they disagree about the master: {', '.join(masters)}",
            "wait for the end of the failover; if there is none, they monitor different servers under one name",
        )
