"""The page in a real browser, with 5 and with 5,000 locks on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery
from playwright.sync_api import Browser, Page, expect

from celery_singleton_lock.diagnosis.verdict import Verdict
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.web import app_of, watch
from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.web.browser import launched, served
from tests.web.scenes import HOSTILE, TASK, entry, hold, over, with_task, write

#: One process cannot run two browsers at once.
pytestmark = pytest.mark.xdist_group("browser")

PAGES = ("", "locks", "tasks", "timeline", "refused", "beat", f"search?q={TASK}")

TOKEN = "a-token-of-these-tests"

PATIENCE = LIMIT * 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@dataclass
class Visit:
    """Somebody who looks at the page of an app.

    Attributes:
        page: the browser's page.
        app: the Celery app.
        url: of the page, without a trailing slash.
        wrong: the browser's complaints: script errors, violations of the content security policy, dialogs.
    """

    page: Page
    app: Celery
    url: str
    wrong: list[str] = field(default_factory=list)

    def go(self, address: str = "") -> Page:
        self.page.goto(f"{self.url}/{address}")
        return self.page

    def is_live(self) -> None:
        expect(self.page.locator("#state")).to_have_text("Live")

    def row(self, text: str, region: str = "locks") -> Any:
        return self.page.locator(f"[data-live={region}] > tr").filter(has_text=text)


Visiting = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Visiting]:
    """Opens the page of a new app; options are passed on to the browser's context."""
    monkeypatch.setattr(watch, "FRESH", 0.0)
    expect.set_options(timeout=PATIENCE)
    with ExitStack() as exits:

        def visiting(
            server: RedisServer = redis_server, *, site: dict[str, Any] | None = None, **context: Any
        ) -> Visit:
            app = with_task(Celery("shop", broker=server.url, set_as_current=False))
            app.conf.update(result_backend=server.url, broker_connection_max_retries=1)
            url = exits.enter_context(served(app_of(app, **(site or {}))))
            opened = browser.new_context(**context)
            exits.callback(opened.close)
            opened.set_default_timeout(PATIENCE)
            page = opened.new_page()
            made = Visit(page, app, url)
            page.on("pageerror", lambda error: made.wrong.append(str(error)))
            page.on("dialog", lambda dialog: (made.wrong.append(dialog.message), dialog.dismiss()))
            page.on("console", lambda message: message.type == "error" and made.wrong.append(message.text))
            return made

        yield visiting


def five(visit: Visit) -> list[Lease]:
    """Five locks, and entries about earlier runs."""
    leases = [hold(visit.app, f"tenant-{number}") for number in range(4)]
    leases.append(hold(visit.app, "queued-one", queued=True))
    write(
        visit.app,
        *(entry(visit.app, f"tenant-{number}", ago=60 - number) for number in range(4)),
        entry(visit.app, "tenant-1", "skip", holder="id-of-tenant-1", holder_node="one@web"),
    )
    return leases


def test_each_page_opens_without_a_complaint(visit: Visiting) -> None:
    made = visit()
    lease, *_ = five(made)
    for address in (*PAGES, f"lock?key={lease.key}"):
        made.go(address)
        expect(made.page.locator("h1")).to_be_visible()
        made.is_live()
    assert made.wrong == []


def test_locks_come_and_go_while_somebody_looks(visit: Visiting) -> None:
    made = visit()
    lease, *_ = five(made)
    made.go("locks")
    expect(made.page.locator("[data-live=locks] > tr")).to_have_count(5)
    made.is_live()
    hold(made.app, "a-new-one")
    expect(made.row("a-new-one")).to_have_count(1)
    Runtime.of(made.app).store.free(lease)
    expect(made.row("tenant-0")).to_have_count(0)
    assert made.wrong == []


def test_hostile_texts_are_not_executed(visit: Visiting) -> None:
    made = visit()
    hold(made.app, "first", label=HOSTILE, task_id=HOSTILE, node=HOSTILE)
    texts = dict.fromkeys(("task", "task_id", "node", "holder", "holder_node", "scheduled", "label"), HOSTILE)
    write(made.app, *(entry(made.app, "x", kind)._replace(**texts) for kind in ("run", "skip", "retry", "free")))
    for address in ("", "locks", "timeline", "refused", "tasks", "beat"):
        made.go(address)
        made.is_live()
    made.go("locks")
    made.is_live()
    hold(made.app, "second", label=f"second{HOSTILE}", task_id=HOSTILE, node=HOSTILE)
    expect(made.row("second")).to_have_count(1)  # It was fetched.
    made.row("second").locator("a").first.click()
    expect(made.page.locator("h1")).to_contain_text("second")
    assert made.page.locator("main img, main script").count() == 0
    assert made.wrong == []


@pytest.mark.slow
def test_all_pages_work_without_scripts(visit: Visiting) -> None:
    made = visit(java_script_enabled=False)
    lease, *_ = five(made)
    for address in (*PAGES, f"lock?key={lease.key}"):
        made.go(address)
        expect(made.page.locator("h1")).to_be_visible()
    page = made.go("timeline")
    expect(page.locator("td.lane rect.good").first).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    page.get_by_label("Find a lock").fill("tenant-2")
    page.keyboard.press("Enter")
    expect(page.locator("[data-live=locks] > tr")).to_have_count(1)
    made.row("tenant-2").get_by_role("link", name=TASK).click()
    expect(page.locator("h1")).to_have_text(f"{TASK} tenant=tenant-2")
    page.get_by_role("link", name="id-of-tenant-2").first.click()
    expect(page.locator("h1")).to_contain_text("id-of-tenant-2")


@pytest.mark.parametrize("width", [320, 375, 1280])
@pytest.mark.slow
def test_pages_fit_their_window(visit: Visiting, width: int) -> None:
    made = visit(viewport={"width": width, "height": 700})
    lease, *_ = five(made)
    hold(made.app, "wide", label="w" * 200, task_id="x" * 200, node="y" * 200)
    for address in (*PAGES, f"lock?key={lease.key}"):
        made.go(address)
        widths = made.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], address


@pytest.mark.slow
def test_page_says_that_the_lock_server_is_gone_and_recovers(visit: Visiting, own_redis: RedisServer) -> None:
    made = visit(own_redis)
    five(made)
    made.go("locks")
    made.is_live()
    own_redis.kill()
    expect(made.page.get_by_role("alert")).to_contain_text("The lock server does not answer")
    expect(made.page.locator("#state")).to_have_text("Waiting for the lock server")
    expect(made.row("tenant-0")).to_have_count(1)
    own_redis.start()
    made.is_live()
    expect(made.page.get_by_role("alert")).to_have_text("")
    expect(made.row("No lock is held.")).to_have_count(1)
    hold(made.app, "a-new-one")
    expect(made.row("a-new-one")).to_have_count(1)


class TestActing:
    @pytest.fixture
    def made(self, visit: Visiting) -> Visit:
        credentials = {"username": "me", "password": TOKEN}
        return visit(site={"token": TOKEN, "allow_release": True}, http_credentials=credentials)

    def test_user_with_the_token_releases_a_lock(self, made: Visit) -> None:
        lease = hold(made.app, "acme", process=over())
        page = made.go(f"lock?key={lease.key}")
        button = page.get_by_role("button", name="Release the lock")
        button.click()  # The box is not ticked, so the browser does not send the form.
        assert "/lock?" in page.url
        page.get_by_label("Release it if").check()
        button.click()
        released = f"Released: task id-of-acme on one@web (pid 7): {Verdict.OVER.fact}."
        expect(page.locator("main [role=status]")).to_have_text(released)
        assert Runtime.of(made.app).store.held(lease.key) == []
        assert made.wrong == []
