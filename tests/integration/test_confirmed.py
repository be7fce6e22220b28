"""Messages keep others out for as long as they may wait once they were sent, and for seconds before."""

from __future__ import annotations

import subprocess
import sys

from celery import Celery
from redis import Redis

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.in_bulk import UNCONFIRMED_TTL
from tests.contract.forging import ForgingProxy
from tests.patience import LIMIT, until
from tests.proxy import KINDS
from tests.redis_server import RedisServer

#: Sends a message, and ends.
SENDS = """
import sys
from celery import Celery
from celery_singleton_lock import SingletonTask
app = Celery("sends", broker="memory://", singleton_lock_backend=sys.argv[1])
@app.task(base=SingletonTask, name="report", lock_scope="until_executed")
def report(): ...
report.delay()
"""


def lasts(client: Redis) -> float:
    """The seconds of the only lock."""
    return max(client.pttl(key) for key in client.scan_iter("*:run*")) / 1000


def test_program_ends_as_soon_as_it_has_sent(own_redis: RedisServer) -> None:
    subprocess.run([sys.executable, "-c", SENDS, own_redis.url], check=True, timeout=LIMIT)
    with own_redis.client() as client:
        assert lasts(client) > 2 * UNCONFIRMED_TTL


def test_lock_server_does_not_answer_at_first(own_redis: RedisServer) -> None:
    with ForgingProxy(own_redis.port) as proxy, own_redis.client() as client:
        app = Celery(broker="memory://", set_as_current=False)
        app.conf.singleton_lock_backend = f"redis://127.0.0.1:{proxy.port}"

        @app.task(base=SingletonTask, name="report", lock_scope="until_executed")
        def report() -> None: ...

        proxy.forge(KINDS["RENEW"], b"-LOADING it is not ready\r\n")
        report.delay()
        until(lambda: proxy.answered)
        assert lasts(client) < UNCONFIRMED_TTL
        proxy.be_honest()
        until(lambda: lasts(client) > 2 * UNCONFIRMED_TTL)
