"""The pages in Django's admin: staff can read them, and nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer
from tests.web.reading import Page

#: Pages that exist.
FOUND = ("", "locks", "locks?q=acme", "tasks", "timeline", "refused", "beat", "doctor", "id?id=id-of-acme")


# One project is set up for all tests.
pytestmark = pytest.mark.xdist_group("web_django")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a project with the pages in its admin reports: see `django_site`."""
    with RedisServer() as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.web.django_site", server.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("address", FOUND)
def test_staff_see_each_page_in_the_admin(told: dict[str, Any], address: str) -> None:
    status, _, html = told["pages"]["staff"][address]
    assert status == 200
    assert '<div class="exclusive-locks">' in html
    assert "Django administration" in html
    assert "</html>" in html


def test_staff_see_the_locks_that_are_held(told: dict[str, Any]) -> None:
    assert "tenant=acme" in told["pages"]["staff"]["locks"][2]
    assert "id-of-acme" in told["pages"]["staff"]["locks?q=acme"][2]
    assert "skipped" in told["pages"]["staff"]["refused"][2]
    (lock,) = (page for address, page in told["pages"]["staff"].items() if address.startswith("lock?key=singleton"))
    assert "Release the lock" not in lock[2]


@pytest.mark.parametrize("address", FOUND)
def test_hostile_texts_are_escaped(told: dict[str, Any], address: str) -> None:
    _, _, html = told["pages"]["staff"][address]
    start = html.index('<div class="exclusive-locks">')
    ours = html[start : html.rindex("</div>", start, html.index("</main>"))]
    assert "<script" not in ours
    assert "<img" not in ours


def test_links_stay_within_the_admin(told: dict[str, Any]) -> None:
    base = "/admin/celery_singleton_lock_web/exclusivelock/"
    html = told["pages"]["staff"]["locks"][2]
    ours = html[html.index('<div class="exclusive-locks">') : html.index("</main>")]
    links = [link.partition('"')[0] for link in ours.split('href="')[1:]]
    assert links
    assert all(link.startswith(base) for link in links)
    assert told["pages"]["staff"]["search?q=acme"][:2] == [302, f"{base}locks?q=acme"]


@pytest.mark.parametrize("who", ["nobody", "customer"])
def test_others_are_sent_to_the_login(told: dict[str, Any], who: str) -> None:
    for address, (status, location, html) in told["pages"][who].items():
        assert status == 302, address
        assert location.startswith("/admin/login/")
        assert "acme" not in html


def test_pages_are_listed_for_staff_and_read_only(told: dict[str, Any]) -> None:
    assert "Exclusive locks" in told["staff"]["index"]
    assert "Exclusive locks" not in told["customer"]["index"]
    assert told["staff"]["post"] == 405
    assert told["staff"]["add"] == 404


def test_unknown_pages_are_not_found(told: dict[str, Any]) -> None:
    assert told["pages"]["staff"]["nowhere"][0] == 404
    assert told["pages"]["staff"]["lock?key=x"][0] == 404


def test_no_migration_is_needed(told: dict[str, Any]) -> None:
    assert "No changes detected" in told["migrations"]


def test_page_is_complete_html(told: dict[str, Any]) -> None:
    html = told["pages"]["staff"]["locks"][2]
    start = html.index('<div class="exclusive-locks">')
    depth, end = 0, start
    while True:
        opened, closed = html.find("<div", end), html.index("</div>", end)
        if 0 <= opened < closed:
            depth, end = depth + 1, opened + 4
        else:
            depth, end = depth - 1, closed + 6
        if not depth:
            break
    assert Page(html[start:end]).is_harmless()
