"""The journal's counts, and the held locks, in Prometheus' format.

One exporter is enough for a cluster: everything that it shows is in Redis, whichever process counted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.keys.key import is_of_queue, name_in
from celery_singleton_lock.runtime import Runtime

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
except ImportError as error:
    raise ImportError("prometheus_client is not installed: pip install 'celery-singleton-lock[prometheus]'") from error

#: The beginning of the metrics' names.
PREFIX = "singleton_lock"


class LockCollector:
    """A collector for `prometheus_client.REGISTRY.register`; asks Redis at each scrape.

    Args:
        app: the Celery app.

    Raises:
        InvalidOption: a setting of the app is unknown or not allowed.
    """

    def __init__(self, app: Any) -> None:
        self._runtime = Runtime.of(app)

    def describe(self) -> list[Metric]:
        """Describe nothing in advance, so that registering asks no server."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics. If the lock server does not answer, there is only `singleton_lock_up`, which is 0."""
        try:
            found = list(self._found())
        except LockUnavailable:
            found = []
        yield GaugeMetricFamily(f"{PREFIX}_up", "Whether the lock server answered.", value=bool(found))
        yield from found

    def _found(self) -> Iterator[Metric]:
        settings, store = self._runtime.settings, self._runtime.store
        journal = store.journal(settings.prefix, size=settings.journal)
        counts, most = metrics.read(journal.counts()), Counter[str]()
        held, queued = Counter[str](), Counter[str]()
        for key, _ in store.all_held(settings.prefix):
            (queued if is_of_queue(key) else held)[_name_in(key)] += 1
        for key, count in journal.refused().items():
            most[_name_in(key)] = max(count, most[_name_in(key)])
        for name, text, by_lock in (
            ("held_now", "Locks that are held.", held),
            ("queued_now", "Locks that messages have held since they were sent.", queued),
            ("refused_in_a_row", "The most refusals in a row under one key of the lock.", most),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["lock"])
            yield _filled(gauge, ([[lock], value] for lock, value in by_lock.items()))
        for counter in metrics.COUNTERS:
            labels = ["task", counter.label] if counter.label else ["task"]
            its = sorted((count, value) for count, value in counts.items() if count.name == counter.name)
            family = CounterMetricFamily(f"{PREFIX}_{counter.name}", counter.text, labels=labels)
            yield _filled(family, ([[count.task, count.label][: len(labels)], value] for count, value in its))
        ran = [it for it in metrics.by_task(counts) if it["runs"]]
        for name, text in metrics.TIMES.items():
            summary = SummaryMetricFamily(f"{PREFIX}_{name}_seconds", text, labels=["task"])
            yield _filled(summary, ([[it["task"]], sum(it["runs"].values()), it[name]] for it in ran))


def _filled(family: Any, rows: Iterable[list[Any]]) -> Metric:
    """A metric with these rows: labels, and values."""
    for row in rows:
        family.add_metric(*row)
    filled: Metric = family
    return filled


def _name_in(key: str) -> str:
    return cleaned.text(name_in(key))
