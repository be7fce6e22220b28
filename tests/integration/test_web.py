"""The live page beside real workers on a real Redis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape

import httpx
import pytest
from celery import Celery

from celery_singleton_lock import LockLost
from celery_singleton_lock.diagnosis.verdict import Verdict
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.web.watch import Watch
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import environment_of, locks
from tests.integration.pages import site
from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.web.scenes import entry, hold, with_task, write

TOKEN = "a-token-of-these-tests"


def test_page_shows_what_is_held_and_what_was_refused(shop: Shop) -> None:
    (worker,) = shop.start("one")
    running = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    copy = shop.send("exclusive", "report")
    copy.get(timeout=LIMIT, propagate=False)
    with site(shop) as page:
        status, shown = page.read("/locks")
        assert status == 200
        assert running.id in shown
        assert worker.name in shown
        until(lambda: copy.id in page.read("/refused")[1])  # The journal is written every few seconds.
        assert running.id in page.read(f"/search?q={copy.id}")[1]


def test_read_only_user_of_the_lock_server_is_enough(own_redis: RedisServer) -> None:
    writing = with_task(Celery("shop", broker=own_redis.url, set_as_current=False))
    lease = hold(writing, "acme")
    write(writing, entry(writing, "acme", "skip"))
    Runtime.of(writing).store.ledger(Watch(writing).beat_key).align({"nightly": 10}, ceiling=20)
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "watcher", "on", ">secret", "~singleton_lock:*", "+@read")
    url = own_redis.url.replace("redis://", "redis://watcher:secret@")
    reading = with_task(Celery("shop", broker=url, set_as_current=False))
    snapshot = Watch(reading).look()
    assert snapshot.error == ""
    assert [it.key for it in snapshot.locks] == [lease.key]
    assert [it.kind for it in snapshot.entries] == ["skip"]
    assert snapshot.lasts == {"nightly": 10}


def test_program_ends_at_once_while_somebody_watches(shop: Shop) -> None:
    """A browser keeps its connection open between two looks."""
    with httpx.Client(timeout=LIMIT) as client, site(shop) as page:
        assert client.get(f"{page.url}/locks").status_code == 200


def test_address_in_use_is_an_error_that_says_so(shop: Shop) -> None:
    with site(shop) as page:
        port = page.url.rpartition(":")[2]
        second = locks("web", "--port", port, env=environment_of(shop))
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr


@contextmanager
def pressing(shop: Shop) -> Iterator[Callable[..., str]]:
    """Press a button on the page of the only lock that is held; returns the answer, which the program must log."""
    token = {"CELERY_SINGLETON_LOCK_WEB_TOKEN": TOKEN}
    with site(shop, "--allow-release", logs="asked the page to", **token) as page:
        assert TOKEN not in page.told
        with httpx.Client(base_url=page.url, auth=("me", TOKEN), timeout=LIMIT) as client:

            def press(action: str) -> str:
                (key,) = shop.held()
                shown = client.get("/lock", params={"key": key}).text
                form = re.search(rf'<form action="/{action}".*?</form>', shown, re.DOTALL)
                assert form is not None, shown
                fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form[0])}
                answer = client.post(f"/{action}", data=fields, headers={"origin": page.url})
                found = re.search(r'<p role="status">(.*?)</p>', answer.text)
                assert found is not None, answer.text
                said = unescape(found[1])
                line = f"me at 127.0.0.1 asked the page to {action}: {said}\n"
                lock = key.removesuffix(":run")
                until(lambda: any(lock in it and it.endswith(line) for it in page.output().splitlines(keepends=True)))
                return said

            yield press


def test_lock_of_a_live_worker_is_not_released_but_its_task_is_stopped(shop: Shop) -> None:
    (worker,) = shop.start("one")
    until(lambda: shop.app.control.ping([worker.name], timeout=1.0, limit=1))
    running = shop.send("exclusive", "report", LONG, singleton_lock={"ttl": 3600.0})
    (run,) = shop.record.wait_for(starts=1)
    # Its main process may learn after the record that the run has begun.
    until(lambda: shop.app.control.inspect(timeout=LIMIT, limit=1).locks()[worker.name])
    with pressing(shop) as press:
        holder = f"task {running.id} on one@test (pid {run.pid})"
        assert press("release") == f"Not released: {holder}: {Verdict.ALIVE.fact}.", "its worker says so"
        assert f"task {running.id} is stopped within a second" in press("stop")
        with pytest.raises(LockLost):
            running.get(timeout=LIMIT)
    until(lambda: shop.held() == [])


def test_new_token_is_printed_and_needed_from_other_hosts(shop: Shop) -> None:
    with site(shop, "--allow-release") as page:
        (token,) = re.findall(r"password \(with any user name\): (\S{32})\n", page.told)
        assert page.read("/")[0] == 401
        assert httpx.get(f"{page.url}/", auth=("", token), timeout=LIMIT).status_code == 200
    with site(shop, "--host", "0.0.0.0") as page:
        assert "Use --allow-host NAME" in page.told
        assert httpx.get(f"{page.url}/", headers={"host": "locks.example"}, timeout=LIMIT).status_code == 421
    with site(shop, "--host", "0.0.0.0", "--allow-host", "locks.example") as page:
        assert "--allow-host" not in page.told
        url = page.url.replace("0.0.0.0", "127.0.0.1")
        for headers in ({}, {"host": "locks.example"}):
            assert httpx.get(f"{url}/locks", headers=headers, timeout=LIMIT).status_code == 401


def test_pattern_is_not_a_host_name(shop: Shop) -> None:
    told = locks("web", "--allow-host", "*", env=environment_of(shop))
    assert told.returncode == 2
    assert "--allow-host: '*' is not a host name" in told.stderr
