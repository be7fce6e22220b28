from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.beside.environments import python_of
from tests.integration import workers
from tests.recording import Record
from tests.redis_server import RedisServer


@pytest.fixture
def worker_with(
    tmp_path: Path, request: pytest.FixtureRequest, redis_server: RedisServer
) -> Iterator[Callable[..., workers.Worker]]:
    """Start a worker of an app, with the packages of a dependency group: its broker, results, locks and events are the
    databases 0 to 3 of `redis_server`.
    """
    with ExitStack() as exits:
        started: list[workers.Worker] = []

        def start(
            app: str,
            *,
            group: str | None = None,
            name: str = "w1",
            arguments: tuple[str, ...] = (),
            environment: dict[str, str] | None = None,
            pool: str = "prefork",
            concurrency: int = 2,
            **conf: Any,
        ) -> workers.Worker:
            variables = workers.environment(
                conf_of(redis_server, **conf), events=redis_server.url_of(3), record=tmp_path / "record"
            )
            worker = workers.Worker(
                name,
                directory=tmp_path,
                environment={**variables, **(environment or {})},
                app=app,
                pool=pool,
                concurrency=concurrency,
                arguments=arguments,
                python=None if group is None else python_of(group),
            )
            started.append(exits.enter_context(worker))
            return worker.wait_until_ready()

        yield start
        if request.session.testsfailed:
            for worker in started:
                print(f"---- {worker.name}\n{worker.log[-3000:]}")


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """What the bodies of the tasks have written down: see `tests.recording`."""
    return Record(tmp_path / "record")


def conf_of(server: RedisServer, **conf: Any) -> dict[str, Any]:
    """The settings of an app on this server; an app of tests.beside takes them from the variable TEST_CONF."""
    return {
        "broker_url": server.url_of(0),
        "result_backend": server.url_of(1),
        "singleton_lock_backend": server.url_of(2),
        "singleton_lock_ttl": 2.0,
        **conf,
    }
