"""A program on Windows, as far as Python shows that: it sends, or is a worker, as its arguments say."""

from __future__ import annotations

import tests.integration.windows  # noqa: F401 - first of all

# isort: split

import json
import os
import sys

from celery import Celery

from celery_singleton_lock import DuplicateResult, SingletonTask

app = Celery("shop", set_as_current=False)
app.conf.update(json.loads(os.environ["TEST_CONF"]))


@app.task(base=SingletonTask, name="shop.sync", lock_key=["tenant_id"], lock_scope="until_executed")
def sync(tenant_id: int) -> int:
    return tenant_id


@app.task(base=SingletonTask, name="shop.run")
def run(tenant_id: int) -> int:
    return tenant_id


def send() -> None:
    run.delay(7)
    first, second = sync.delay(7), sync.delay(7)
    assert isinstance(second, DuplicateResult)
    assert second.id == first.id
    assert run.apply((7,)).get() == 7
    print(first.id)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.worker_main(sys.argv[1:])
    else:
        send()
