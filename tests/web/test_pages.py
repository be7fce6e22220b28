"""The pages, without a browser: what they show, what they refuse, and that hostile texts are escaped."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from celery import Celery
from celery.schedules import crontab, solar
from starlette.applications import Starlette
from starlette.routing import Mount

from celery_singleton_lock import SingletonTask, clock, process_identity
from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal_entry import CRASHED, KINDS
from celery_singleton_lock.keys.key import key_of_beat, key_of_text, name_of_beat
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.web import app_of, pages, watch
from celery_singleton_lock.web.access import HEADERS, is_own_origin
from celery_singleton_lock.web.schedule import planned
from celery_singleton_lock.web.watch import Watch
from tests.web.client import Client
from tests.web.reading import GLOSSARY, Page
from tests.web.scenes import HOSTILE, TASK, entry, hold, key_of, over, with_task, write

#: A URL where nobody answers.
NOBODY = "redis://127.0.0.1:1/0"

PAGES = ("", "locks", "tasks", "timeline", "refused", "beat")


def client_of(app: Celery, **options: Any) -> Client:
    return Client(app_of(app, **options))


@pytest.fixture
def client(app: Celery) -> Client:
    return client_of(app)


def page(client: Client, address: str, status: int = 200) -> Page:
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    return Page(answer.text)


def test_locks_are_shown_with_holder_and_place(app: Celery, client: Client) -> None:
    lease = hold(app, "acme")
    hold(app, "other", queued=True)
    shown = page(client, "/locks").rows()
    (acme,) = (row for row in shown if "tenant=acme" in row)
    assert "id-of-acme" in acme
    assert "one@web (pid 7)" in acme
    (queued,) = (row for row in shown if "tenant=other" in row)
    assert "message id-of-other" in queued
    Runtime.of(app).store.free(lease)
    assert not [row for row in page(client, "/locks").rows() if "tenant=acme" in row]


def test_lock_whose_process_is_gone_is_marked(app: Celery, client: Client) -> None:
    hold(app, "acme", process=over())
    hold(app, "other", process=process_identity.own())
    hold(app, "queued", queued=True, process=over())
    shown = page(client, "/locks").rows()
    assert [row for row in shown if GONE in row] == [row for row in shown if "id-of-acme" in row]


def test_page_says_so_if_no_lock_is_held(client: Client) -> None:
    assert "No lock is held." in page(client, "/locks").rows()
    assert "No lock refuses copies in a row." in page(client, "/refused").rows()
    assert "Nothing happened in this time." in page(client, "/timeline").rows()


def test_each_kind_of_ending_has_words(app: Celery, client: Client) -> None:
    write(app, *(entry(app, f"({kind})", kind, holder="the-holder", holder_node="two@web") for kind in KINDS))
    shown = page(client, f"/search?q={TASK}").rows()
    for kind in KINDS:
        (row,) = (row for row in shown if f"tenant=({kind})" in row)
        assert "the-holder" in row


def test_refusals_name_the_holder(app: Celery, client: Client) -> None:
    since = clock.wall() - 50
    refusal = entry(app, "acme", "skip", holder="the-holder", holder_node="two@web", holder_since=since)
    write(app, entry(app, "acme"), refusal, entry(app, "acme", "retry", holder="the-holder"))
    (row,) = (row for row in page(client, "/refused").rows() if "skipped" in row)
    assert "held by the-holder on two@web, by then for 40 s" in row
    (in_a_row,) = (row for row in page(client, "/refused").rows() if row.startswith(f"{TASK} tenant=acme"))
    assert in_a_row.endswith("1")


def test_everything_about_a_key_is_on_its_page(app: Celery, client: Client) -> None:
    lease = hold(app, "acme")
    write(app, entry(app, "acme"), entry(app, "acme", "skip"), entry(app, "other"))
    shown = page(client, f"/lock?key={lease.key.replace('{', '%7B').replace('}', '%7D')}")
    assert shown.all("h1")[0].text == f"{TASK} tenant=acme"
    assert "other" not in shown.html
    assert str(lease.fence) in [it.text for it in shown.all("dd")]
    assert len([row for row in shown.rows() if row.endswith("pid 7") and ("skipped" in row or "ran for" in row)]) == 2
    assert page(client, f"/lock?key={lease.key}:run").all("h1")[0].text == f"{TASK} tenant=acme"


def test_task_id_leads_to_its_locks_and_copies(app: Celery, client: Client) -> None:
    hold(app, "acme")
    write(app, entry(app, "acme"), entry(app, "other", "skip", holder="id-of-acme"), entry(app, "third"))
    (link, *_) = (it for it in page(client, "/locks").links() if it.startswith("/search?"))
    assert link == "/search?q=id-of-acme"
    shown = page(client, link).rows()
    assert [name for name in ("acme", "other", "third") if any(f"tenant={name}" in row for row in shown)] == [
        "acme",
        "other",
    ]


@pytest.mark.parametrize("address", ["/lock?key=x", "/lock", "/nowhere"])
def test_unknown_pages_are_not_found(client: Client, address: str) -> None:
    assert "Not found" in page(client, address, 404).all("h1")[0].text


@pytest.fixture
def nightly(app: Celery) -> str:
    """The key of a lock without arguments."""
    name = "shop.nightly_report"

    @app.task(name=name, shared=False, base=SingletonTask, lock_key=[])
    def nightly_report() -> None: ...

    key: str = nightly_report.lock_key_of()
    request = LockRequest(
        key, new_owner(), ttl=600.0, holder=Holder("the-run", 0, "one@web", 7, clock.wall() - 5, ttl=9.0)
    )
    Runtime.of(app).store.acquire(request)
    write(app, entry(app, "", "skip", task=name, key=key, label="", task_id="the-copy", holder="the-run"))
    return key


@pytest.mark.parametrize("address", ["", "locks", "tasks", "refused", "timeline", "search?q=nightly"])
def test_lock_without_arguments_has_the_name_of_its_task(client: Client, nightly: str, address: str) -> None:
    shown = page(client, f"/{address}")
    digest = nightly.rpartition(":")[2][:12]
    texts = [it.text for it in shown.elements if it.tag in ("a", "th", "td", "h1")]
    assert "shop.nightly_report" in texts
    assert not [text for text in texts if digest in text]
    # The key is there for those who ask: it is shown by a click, or when the mouse rests on the link.
    linked = [it.attributes.get("title") for it in shown.elements if it.tag in ("a", "th")]
    assert nightly in linked or address == "tasks"


def show_beat(app: Celery) -> None:
    """As a beat of the schedule "shop" does."""
    runtime = Runtime.of(app)
    holder = Holder(node="beat@one", pid=5, since=clock.wall() - 9000, ttl=10.0)
    key = key_of_text(runtime.settings.prefix, name_of_beat("shop"), "one")
    runtime.store.acquire(LockRequest(key, new_owner(), ttl=10.0, holder=holder))


def test_lock_of_beat_is_named_and_needs_no_attention(app: Celery, client: Client) -> None:
    show_beat(app)
    assert any(row.startswith("beat:shop beat") for row in page(client, "/locks").rows())
    shown = page(client, "")
    assert [row for row in shown.rows() if "beat" in row] == []
    assert "0 held" in [it.text for it in shown.all("a")]


class TestSearch:
    """Why did my job not run? is always about the past."""

    def test_task_id_shows_its_copies_and_those_that_met_it(self, client: Client, nightly: str) -> None:
        for text in ("the-copy", "the-run", " shop.nightly_report "):
            rows = page(client, "/search?" + urlencode({"q": text})).rows()
            assert any("the-copy" in row and "the-run" in row for row in rows)

    @pytest.mark.parametrize("suffix", ["", ":queue", ":run"])
    def test_label_and_key_show_the_lock(self, app: Celery, client: Client, suffix: str) -> None:
        write(app, entry(app, "acme"), entry(app, "acme", "skip"), entry(app, "other"))
        key = key_of(app, "acme")
        for text in ("tenant=acme", f"{key}{suffix}"):
            shown = page(client, "/search?" + urlencode({"q": text}))
            assert {it for it in shown.links() if it.startswith("/lock?")} == {"/lock?" + urlencode({"key": key})}

    @pytest.mark.parametrize("text", ["ACME", "f-acme", "two@", "id-of-other", "{x}", "", HOSTILE])
    def test_any_text_is_looked_for_now_and_in_the_past(self, app: Celery, client: Client, text: str) -> None:
        hold(app, "acme", task_id="f-acme-1")
        write(app, entry(app, "acme"), entry(app, "other", "skip", node="two@web", task_id="an-id-of-other"))
        rows = page(client, "/search?" + urlencode({"q": text})).rows()
        found = {name for name in ("acme", "other") if any(f"tenant={name}" in row for row in rows)}
        assert found == {"ACME": {"acme"}, "f-acme": {"acme"}, "two@": {"other"}, "id-of-other": {"other"}}.get(
            text, {"acme", "other"} if not text else set()
        )


def test_crashed_runs_are_counted(app: Celery, client: Client) -> None:
    write(app, entry(app, "acme"), entry(app, "acme", "free", outcome=CRASHED))
    shown = page(client, "/tasks")
    (crashed,) = (it for it in shown.all("td") if it.attributes["data-label"] == "crashed")
    assert (crashed.text, crashed.attributes["class"]) == ("1", "n bad")
    cells = page(client, f"/search?q={TASK}").all("td")
    assert [it.text for it in cells if it.attributes.get("data-label") == "crashed"] == ["1"]


@pytest.mark.parametrize("address", ["lock?key={key}", "refused", "search?q=the-id", "search?q=acme"])
def test_history_comes_in_pages(app: Celery, client: Client, address: str) -> None:
    write(
        app, *(entry(app, "acme", "skip", task_id="the-id", ago=200.0 - number, pid=number) for number in range(1, 121))
    )
    next_page, seen = "/" + address.format(key=key_of(app, "acme").replace("{", "%7B").replace("}", "%7D")), []
    while next_page:
        shown = page(client, next_page)
        rows = [row for row in shown.rows() if " pid " in row]
        assert len(rows) <= pages.PAGE == 50
        seen += rows
        next_page = next((it.attributes["href"] for it in shown.all("a") if it.attributes.get("rel") == "next"), "")
    assert [row.rpartition(" ")[2] for row in seen] == [str(number) for number in range(120, 0, -1)]


def test_thousands_of_locks_come_in_pages(app: Celery, client: Client) -> None:
    for number in range(pages.PAGE * 2 + 1):
        hold(app, f"number-{number}", since=clock.wall() - 1000 + number)
    seen: list[str] = []
    address = "/locks?sort=longest+held"
    while address:
        shown = page(client, address)
        seen += [row for row in shown.rows() if "tenant=" in row]
        address = next((it.attributes["href"] for it in shown.all("a") if it.attributes.get("rel") == "next"), "")
    assert len(seen) == len(set(seen)) == pages.PAGE * 2 + 1
    assert "number-0" in seen[0]
    assert "number-100" in seen[-1]
    assert page(client, "/locks?page=99").rows()[-1] == page(client, "/locks?page=3").rows()[-1]


@pytest.mark.parametrize(
    "query", ["page=-1", "page=1e400", "page=nan", "page=x", "sort=evil", "minutes=inf", "q=%00%ff"]
)
@pytest.mark.parametrize("address", ["/locks", "/timeline", "/refused", "/tasks"])
def test_wrong_value_in_an_address_means_the_default(client: Client, address: str, query: str) -> None:
    assert page(client, f"{address}?{query}").is_harmless()


class TestEscaping:
    """Anybody who sends messages or writes to Redis can choose labels, ids, nodes, names and keys."""

    @pytest.fixture(autouse=True)
    def hostile(self, app: Celery) -> None:
        hold(app, HOSTILE, label=HOSTILE, task_id=HOSTILE, node=HOSTILE)
        hold(app, "queued", label=HOSTILE, task_id=HOSTILE, node=HOSTILE, queued=True)
        hold(app, "x", name=HOSTILE)
        texts = dict.fromkeys(("task", "task_id", "node", "holder", "holder_node", "scheduled", "label"), HOSTILE)
        for kind in KINDS:
            write(app, entry(app, kind, kind)._replace(**texts))
            write(app, entry(app, kind, kind)._replace(**texts, key=f"{key_of(app, 'x')}{HOSTILE}", outcome=HOSTILE))
        app.conf.beat_schedule = {
            HOSTILE: {"task": HOSTILE, "schedule": timedelta(seconds=10)},
            "broken": {"task": HOSTILE, "schedule": HOSTILE, "nonsense": HOSTILE},
            "no-entry": HOSTILE,
        }
        app.conf.singleton_lock_beat_name = HOSTILE
        runtime = Runtime.of(app)
        ledger = runtime.store.ledger(key_of_beat(runtime.settings.prefix, HOSTILE))
        ledger.align({f"{HOSTILE} in a database": 10, "from the future": 2**52}, ceiling=2**53)

    @pytest.mark.parametrize("address", PAGES)
    def test_hostile_texts_are_escaped(self, client: Client, address: str) -> None:
        shown = page(client, f"/{address}")
        assert shown.is_harmless()
        assert "<script>alert" in (" ".join(shown.rows())), "it is shown as text"

    @pytest.mark.parametrize("address", ["lock?key=", "locks?q=", "search?q=", "timeline?q="])
    def test_hostile_texts_in_an_address_are_escaped(self, client: Client, address: str) -> None:
        answer = client.get(f"/{address}" + HOSTILE.replace("&", "%26").replace("<", "%3C"), follow_redirects=True)
        assert Page(answer.text).is_harmless()

    def test_links_lead_to_existing_pages(self, client: Client) -> None:
        for address in PAGES:
            for link in page(client, f"/{address}").links():
                if link.startswith(("/search?", "/lock?")):
                    assert page(client, link).is_harmless()


class TestHosts:
    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9809", "127.0.0.1:1", "[::1]:9809", "localhost."])
    def test_names_of_this_machine_are_answered(self, client: Client, host: str) -> None:
        assert client.get("/", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "localhost.evil.example", "localhost@evil.example", "evil/localhost", "", "[", "a:b"]
    )
    @pytest.mark.parametrize("address", ["/", "/page.css"])
    def test_other_names_are_refused(self, client: Client, host: str, address: str) -> None:
        answer = client.get(address, headers={"host": host})
        assert answer.status_code == 421
        assert "--allow-host" in answer.text

    def test_other_names_can_be_allowed(self, app: Celery) -> None:
        client = client_of(app, hosts=["Ops.example"])
        assert client.get("/", headers={"host": "ops.example:80"}).status_code == 200
        assert client.get("/").status_code == 421

    @pytest.mark.parametrize(
        ("given", "host"),
        [
            ("ops.example:8443", "ops.example"),
            ("https://Ops.example", "ops.example:443"),
            ("http://ops.example:80/", "ops.example"),
            ("ops.example.", "ops.example"),
            ("[::1]", "[::1]:9809"),
            ("::1", "[::1]"),
            ("10.0.0.7:80", "10.0.0.7"),
        ],
    )
    def test_host_may_be_given_as_a_part_of_an_address(self, app: Celery, given: str, host: str) -> None:
        assert client_of(app, hosts=[given]).get("/", headers={"host": host}).status_code == 200

    def test_pattern_is_not_a_name(self, app: Celery) -> None:
        for name in (
            "*",
            "*.example",
            "",
            "a b",
            "https://ops.example/locks",
            "user@ops.example",
            "ops.example:x",
            "b\u00fcro.example",
        ):
            with pytest.raises(ValueError, match=r"is not a host name; allowed: .* such as 'locks.example.com'"):
                app_of(app, hosts=["localhost", name])

    @pytest.mark.parametrize(
        ("origin", "own"),
        [
            ("http://localhost:1", True),
            ("https://LOCALHOST:1", True),
            ("http://localhost", False),
            ("http://localhost:2", False),
            ("http://evil@localhost:1", False),
            ("null", False),
            ("", False),
            (None, False),
            ("http://[", False),
            ("ftp://localhost:1", False),
        ],
    )
    def test_origin_must_match_in_all_parts(self, origin: str | None, own: bool) -> None:
        assert is_own_origin(origin, "localhost:1") is own


@pytest.mark.parametrize("address", ["/", "/page.js", "/search?q=x", "/nowhere"])
def test_each_answer_has_the_headers_that_keep_browsers_in_check(client: Client, address: str) -> None:
    answer = client.get(address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert {name for name, value in HEADERS.items() if answer.headers.get(name) != value} <= {"Cache-Control"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("address", ["/", "/locks", "/lock"])
def test_pages_can_only_be_read(app: Celery, client: Client, method: str, address: str) -> None:
    hold(app, "acme")
    assert client.request(method, address).status_code == 403
    assert client.request(method, address, headers={"origin": client.origin}).status_code == 405
    assert any("tenant=acme" in row for row in page(client, "/locks").rows())


def test_page_can_be_mounted_in_another_app(app: Celery) -> None:
    hold(app, "acme")
    mounted = Starlette(routes=[Mount("/ops/locks", app_of(app))])
    client = Client(mounted)
    for shown in (page(client, "/ops/locks/"), page(client, "/ops/locks/timeline")):
        below = [it for it in shown.links() if not it.startswith(("#", GLOSSARY))]
        assert below
        for link in below:
            assert link.startswith("/ops/locks/")
            assert client.get(link).status_code == 200
    assert shown.all("form")[0].attributes["action"] == "/ops/locks/search"
    for tag, name in (("link", "href"), ("script", "src")):
        assert client.get(shown.all(tag)[0].attributes[name]).status_code == 200
    assert page(client, "/ops/locks/nowhere", 404).is_harmless()


@pytest.mark.parametrize("address", PAGES)
def test_page_says_that_the_lock_server_does_not_answer(address: str) -> None:
    app = with_task(Celery("shop", broker=NOBODY, set_as_current=False))
    client = client_of(app)
    told = trouble(page(client, f"/{address}", 503))
    assert told.startswith("The lock server does not answer: lock server redis://127.0.0.1:1/0: ")
    assert "LockUnavailable(" not in told


def trouble(shown: Page) -> str:
    (found,) = (it for it in shown.elements if it.attributes.get("data-live") == "trouble")
    return found.text


def test_last_known_locks_are_shown_as_such_when_the_lock_server_is_gone(
    app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(app, "acme")
    page(client, "/locks")

    def gone(*_: Any) -> Any:
        raise watch.LockUnavailable("redis://here", "nobody answers")

    store = Runtime.of(app).store
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "all_held", gone)
        shown = page(client, "/locks", 503)
    assert "nobody answers" in trouble(shown)
    assert "You see what was true at" in trouble(shown)
    assert any("tenant=acme" in row for row in shown.rows())
    assert trouble(page(client, "/locks")) == ""


def test_journal_is_read_once_and_each_entry_is_kept_once(app: Celery) -> None:
    looking = Watch(app)
    write(app, entry(app, "first"))
    looking.look()
    write(app, entry(app, "second"))
    assert [it.label for it in looking.look().entries] == ["tenant=first", "tenant=second"]
    assert [it.label for it in looking.look().entries] == ["tenant=first", "tenant=second"]


class TestBeat:
    def test_next_tick_follows_from_the_last_run(self, app: Celery) -> None:
        app.conf.beat_schedule = {"often": {"task": TASK, "schedule": timedelta(seconds=30)}}
        looking = Watch(app)
        runtime = Runtime.of(app)
        ledger = runtime.store.ledger(looking.beat_key)
        now = clock.wall()
        ledger.align({"often": round(now * 1_000_000), "in a database": 10}, ceiling=2**60)
        first, second = planned(app, looking.look())
        assert (first.name, first.task, first.last) == ("often", TASK, pytest.approx(now))
        assert first.next == pytest.approx(now + 30)
        assert (second.name, second.task, second.next) == ("in a database", "", None)

    @pytest.mark.parametrize(
        ("schedule", "shown"),
        [
            (7.0, "freq: 7.00 seconds"),
            (timedelta(minutes=90), "freq: 1.50 hours"),
            (crontab(minute="*/5", hour=3), "crontab: */5 3 * * *"),
            (solar("sunset", 52.5, 13.4), "solar: sunset"),
        ],
    )
    def test_schedule_can_be_read(self, app: Celery, client: Client, schedule: Any, shown: str) -> None:
        app.conf.beat_schedule = {"often": {"task": TASK, "schedule": schedule}}
        (row,) = (row for row in page(client, "/beat").rows() if row.startswith("often"))
        assert shown in row

    def test_beats_are_shown(self, app: Celery, client: Client) -> None:
        assert "No beat runs for this schedule." in page(client, "/beat").rows()
        show_beat(app)
        assert any("beat beat@one (pid 5)" in row for row in page(client, "/beat").rows())


class TestTimeline:
    def test_latest_lock_is_on_top_and_what_is_too_old_is_left_out(self, app: Celery, client: Client) -> None:
        write(app, entry(app, "old", ago=4000), entry(app, "first", ago=50), entry(app, "second", ago=40))
        hold(app, "now")
        hold(app, "queued", queued=True)
        labels = [it.text for it in page(client, "/timeline").all("span") if it.text.startswith("tenant=")]
        assert labels == ["tenant=second", "tenant=first", "tenant=now"]
        assert "tenant=old" in page(client, "/timeline?minutes=360").html
        assert "tenant=first" not in page(client, "/timeline?q=second").html

    def test_thousands_of_entries_are_drawn_only_in_part(self, app: Celery, client: Client) -> None:
        write(app, *(entry(app, f"{number % 40}", ago=300 - number / 50, lasted=0.01) for number in range(10_000)))
        shown = page(client, "/timeline")
        assert len([it for it in shown.all("svg") if it.attributes.get("role") == "img"]) == pages.LANES
        assert len(shown.all("rect")) <= pages.LANES * pages.MOST_BARS + 10


def test_missing_extra_is_named() -> None:
    program = """
import sys
sys.modules["starlette"] = None
import celery_singleton_lock, celery_singleton_lock.cli
try:
    import celery_singleton_lock.web
except ImportError as error:
    print(error)
from celery import Celery
from celery.schedules import crontab, solar
from celery.bin.base import CLIContext
from click.testing import CliRunner
context = CLIContext(app=Celery("shop", broker="redis://127.0.0.1:1"), no_color=True, workdir=None)
print(CliRunner().invoke(celery_singleton_lock.cli.locks, ["web"], obj=context).output)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    named = r"starlette\S* is not installed: pip install 'celery-singleton-lock\[web\]'"
    assert len(re.findall(named, done.stdout)) == 2, done.stdout
    assert f"Error: {done.stdout.splitlines()[0]}" in done.stdout
