"""A result backend that remembers what was stored for each task, and when."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.backends.base import KeyValueStoreBackend

from tests.simulation.scheduler import simulation

#: Seconds after which a result is forgotten, if results are forgotten at all.
FORGOTTEN = 0.3


class Backend(KeyValueStoreBackend):
    """A backend in the memory of the simulation, for all processes."""

    supports_native_join = False
    persistent = False

    @property
    def _content(self) -> dict[Any, Any]:
        content: dict[Any, Any] = vars(simulation()).setdefault("results", {})
        return content

    def get(self, key: Any) -> Any:
        return self._content.get(_text(key))

    def set(self, key: Any, value: Any) -> None:
        self._content[_text(key)] = value

    def as_uri(self, include_password: bool = True) -> str:
        return "simulated://"

    def _store_result(self, task_id: str, result: Any, state: str, *rest: Any, **options: Any) -> Any:
        run = simulation()
        run.note("stores", f"{task_id} {state}")
        if run.now < run.world.results_slow_until and run.current is not None:  # type: ignore[attr-defined]
            run.park(run.rng.uniform(0, 2.0))
        for on_result in getattr(run, "on_result", ()):
            on_result(task_id, state, result)
        if state in states.READY_STATES and run.world.plan.forgets:  # type: ignore[attr-defined]
            run.after(FORGOTTEN, lambda: self._content.pop(_text(self.get_key_for_task(task_id)), None))
        return super()._store_result(task_id, result, state, *rest, **options)


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)
