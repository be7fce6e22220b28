"""The journal's counts, and the held locks, in Prometheus' format.

One exporter is enough for a cluster: everything that it shows is in Redis, whichever process counted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
    """A collector for `prometheus_client.REGISTRY.register`; asks Redis at each scrape. Made with `of`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @classmethod
    def of(cls, app: Any) -> LockCollector:
        """The collector of a Celery app, for a registry of your own.

        Raises:
            InvalidOption: a setting of the app is unknown or not allowed.
        """
        return cls(Runtime.of(app))

    def describe(self) -> list[Metric]:
        """Describe nothing in advance, so that registering asks no server."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics. If the lock server does not answer, there is only `singleton_lock_up`, which is 0."""
        try:
            found = list(self._found())
            up = 1
        except LockUnavailable:
            found, up = [], 0
        yield GaugeMetricFamily(f"{PREFIX}_up", "Whether the lock server answered.", value=up)
        yield from found

    def _found(self) -> Iterator[Metric]:
        settings, store = self._runtime.settings, self._runtime.store
        journal = store.journal(settings.prefix, size=settings.journal)
        counts = metrics.read(journal.counts())
        held, queued = Counter[str](), Counter[str]()
        for key, _ in store.all_held(settings.prefix):
            (queued if is_of_queue(key) else held)[_name_in(key)] += 1
        yield _gauge("held_now", "Locks that are held.", held)
        yield _gauge("queued_now", "Locks that messages have held since they were sent.", queued)
        most: dict[str, int] = {}
        for key, count in journal.refused().items():
            most[_name_in(key)] = max(count, most.get(_name_in(key), 0))
        yield _gauge("refused_in_a_row", "The most refusals in a row under one key of the lock.", most)
        for counter in metrics.COUNTERS:
            yield _counter(counter, counts)
        for name, text in metrics.TIMES.items():
            yield _summary(name, text, counts)


def _gauge(name: str, text: str, by_lock: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["lock"])
    for lock, value in by_lock.items():
        family.add_metric([lock], value)
    return family


def _name_in(key: str) -> str:
    return cleaned.text(name_in(key))


def _counter(counter: metrics.Counter, counts: dict[metrics.Count, int]) -> Metric:
    labels = ["task", counter.label] if counter.label else ["task"]
    family = CounterMetricFamily(f"{PREFIX}_{counter.name}", counter.text, labels=labels)
    for count, value in sorted(counts.items()):
        if count.name == counter.name:
            family.add_metric([count.task, count.label][: len(labels)], value)
    return family


def _summary(name: str, text: str, counts: Mapping[metrics.Count, int]) -> Metric:
    family = SummaryMetricFamily(f"{PREFIX}_{name}_seconds", text, labels=["task"])
    for task in sorted({count.task for count in counts if count.name == name}):
        family.add_metric([task], metrics.runs(task, counts), metrics.seconds(name, task, counts))
    return family
