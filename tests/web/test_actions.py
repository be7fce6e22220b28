"""Who may release locks and stop tasks, and what comes of it."""

from __future__ import annotations

from http import cookies
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.diagnosis.verdict import Verdict
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.web import access, actions, app_of
from celery_singleton_lock.web.access import COOKIE, Access
from celery_singleton_lock.web.tries import FREE, MOST_ADDRESSES, PAUSE, Tries
from tests.patience import from_here_on
from tests.web.client import Client
from tests.web.reading import Element, Page
from tests.web.scenes import hold, over

TOKEN = "a-token-of-the-tests"

#: The holder that `hold` makes for "acme", in words.
HOLDER = "task id-of-acme on one@web (pid 7)"

#: The text about a lock whose holder is alive.
NOT_RELEASED = f"Not released: {HOLDER}: {Verdict.ALIVE.fact}."


def client_of(app: Celery, **options: Any) -> Client:
    return Client(app_of(app, **{"token": TOKEN, "allow_release": True, **options}))


@pytest.fixture
def client(app: Celery) -> Client:
    return client_of(app)


def sign_in(client: Client, token: str = TOKEN) -> int:
    return client.post("/login", data={"token": token}, headers={"origin": client.origin}).status_code


def forms(client: Client, lease: Lease) -> list[dict[str, str]]:
    """The forms of a lock's page that change something: their fields, and their addresses as "action"."""
    answer = client.get("/lock", params={"key": lease.key})
    found: list[dict[str, str]] = []
    for it in Page(answer.text).elements:
        if it.tag == "form":
            found.append({"action": it.attributes["action"], "method": it.attributes.get("method", "get")})
        elif it.tag == "input" and it.attributes.get("name") and found:
            found[-1][it.attributes["name"]] = it.attributes.get("value", "")
    return [form for form in found if form["method"] == "post"]


def press(client: Client, form: dict[str, str], **changed: str) -> tuple[int, str]:
    """Send a form as its page does, or with other fields; returns the status and the message."""
    fields = {**form, **changed}
    answer = client.post(fields.pop("action"), data=fields, headers={"origin": client.origin})
    said: list[Element] = []
    if answer.status_code == 200:
        said = [it for it in Page(answer.text).all("p") if it.attributes.get("role") == "status"]
    return answer.status_code, "".join(it.text for it in said) or answer.text


def is_held(app: Celery, lease: Lease) -> bool:
    return bool(Runtime.of(app).store.held(lease.key))


def test_lock_of_a_process_that_is_over_is_released(app: Celery, client: Client) -> None:
    assert sign_in(client) == 303
    lease = hold(app, "acme", process=over())
    release, stop = forms(client, lease)
    assert (release["action"], stop["action"]) == ("/release", "/stop")
    assert press(client, release) == (200, f"Released: {HOLDER}: {Verdict.OVER.fact}.")
    assert not is_held(app, lease)


def test_lock_that_is_not_renewed_is_released(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_in(client)
    lease = hold(app, "acme", ttl=50.0)
    release, _ = forms(client, lease)
    time = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: time[-1])
    monkeypatch.setattr(clock, "sleep", from_here_on(lambda _: time.append(time[0] + 47), clock.sleep))
    assert press(client, release) == (200, f"Released: {HOLDER}: {Verdict.LATE.fact}.")


def test_lock_of_a_live_holder_is_not_released(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_in(client)
    lease = hold(app, "acme", ttl=50.0)
    release, _ = forms(client, lease)
    now, passed = clock.now, [0.0]
    store = Runtime.of(app).store

    def renewed(_: float) -> None:
        passed.append(20.0)
        store.renew([lease], timeout=1.0)

    monkeypatch.setattr(clock, "now", lambda: now() + passed[-1])
    monkeypatch.setattr(clock, "sleep", from_here_on(renewed, clock.sleep))
    status, said = press(client, release)
    assert status == 200
    assert said == NOT_RELEASED
    assert is_held(app, lease)


def test_verdict_that_would_take_too_long_is_not_waited_for(app: Celery, client: Client) -> None:
    sign_in(client)
    lease = hold(app, "acme", ttl=3600.0)
    release, _ = forms(client, lease)
    assert "It takes up to 53 min to find out whether it is alive" in press(client, release)[1]
    assert is_held(app, lease)


@pytest.mark.parametrize("number", [0, 1], ids=["release", "stop"])
def test_forms_act_only_on_the_hold_that_was_seen(app: Celery, client: Client, number: int) -> None:
    sign_in(client)
    seen = hold(app, "acme")
    form = forms(client, seen)[number]
    store = Runtime.of(app).store
    store.free(seen)
    later = hold(app, "acme", process=over())
    assert later.key == seen.key
    assert press(client, form) == (200, "The holder that you saw no longer holds it; nothing was done.")
    assert is_held(app, later)


@pytest.mark.parametrize("changed", [{"slot": "1"}, {"slot": "²"}, {"key": "x"}, {"mark": ""}, {"mark": "é"}])
def test_forms_that_were_tampered_with_do_nothing(app: Celery, client: Client, changed: dict[str, str]) -> None:
    sign_in(client)
    lease = hold(app, "acme", process=over())
    for form in forms(client, lease):
        status, said = press(client, form, **changed)
        assert status == 200
        assert "nothing was done" in said
        assert is_held(app, lease)


def test_owner_token_is_not_on_the_page(app: Celery, client: Client) -> None:
    sign_in(client)
    lease = hold(app, "acme")
    (held,) = Runtime.of(app).store.held(lease.key)
    text = client.get("/lock", params={"key": lease.key}).text
    assert held.owner not in text
    assert actions.mark_of(HeldLock.of(lease.key, held)) in text


class Control:
    """Replaces `app.control`: one worker answers."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def broadcast(self, command: str, **options: Any) -> Any:
        self.asked.append({"command": command, **options})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([{"one@web": {"ok": "it notices <b>"}}], "The worker says: it notices <b>."),
        ([{"one@web": {"error": "no"}}], "The worker says: no."),
        ([{"two@web": {"ok": "not asked"}}], "Worker one@web did not answer"),
        ([], "Worker one@web did not answer"),
        (None, "Worker one@web did not answer"),
        (["nonsense", {"one@web": 7}], "Worker one@web did not answer"),
        (OSError("no broker"), "The worker cannot be asked: OSError: no broker."),
    ],
)
def test_worker_of_the_holder_is_asked_to_stop_the_task(
    app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    control = Control(answer)
    monkeypatch.setattr(app, "control", control, raising=False)
    sign_in(client)
    lease = hold(app, "acme")
    _, stop = forms(client, lease)
    assert press(client, stop)[1].startswith(said)
    (asked,) = control.asked
    assert (asked["destination"], asked["arguments"]) == (["one@web"], {"key": lease.key, "mark": stop["mark"]})


def test_lock_of_a_message_has_no_task_to_stop(app: Celery, client: Client) -> None:
    sign_in(client)
    assert forms(client, hold(app, "acme", queued=True)) == []
    (only,) = forms(client, hold(app, "kept", pid=0))
    assert only["action"] == "/release"


class TestAccess:
    def test_nobody_may_act_without_the_switch(self, app: Celery) -> None:
        for options in ({"token": "", "allow_release": False}, {"allow_release": False}):
            client = client_of(app, **options)
            lease = hold(app, "acme", ttl=60)
            if options.get("token") is None:
                assert sign_in(client) == 303
            assert forms(client, lease) == []
            for action in ("/release", "/stop"):
                answer = client.post(action, data={"key": lease.key}, headers={"origin": client.origin})
                assert answer.status_code in (404, 405)
            Runtime.of(app).store.free(lease)

    def test_nobody_may_act_without_the_token(self, app: Celery, client: Client) -> None:
        lease = hold(app, "acme")
        assert forms(client, lease) == []
        for token in ("", "wrong", TOKEN[:-1], f"{TOKEN} ", "é" * 20):
            assert sign_in(client, token) == 403
        assert client.cookies == {}
        assert press(client, {"action": "/release", "key": lease.key, "sure": "yes", "proof": ""})[0] == 403

    def test_session_cookie_is_hidden_from_scripts_and_other_sites(self, client: Client) -> None:
        answer = client.post("/login", data={"token": TOKEN}, headers={"origin": client.origin})
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/" in cookie
        assert TOKEN not in cookie

    def test_form_of_another_session_or_site_is_refused(self, app: Celery, client: Client) -> None:
        sign_in(client)
        lease = hold(app, "acme", process=over())
        release, _ = forms(client, lease)
        other = client_of(app)
        sign_in(other)
        assert press(other, release)[0] == 403
        fields = {name: value for name, value in release.items() if name != "action"}
        for origin in ("http://evil.example", "null", "http://localhost:1", "https://localhost:9809.evil.example"):
            assert client.post("/release", data=fields, headers={"origin": origin}).status_code == 403
        assert client.post("/release", data=fields).status_code == 403, "without an origin"
        assert press(client, release, proof="")[0] == 403
        assert press(client, release, proof=release["proof"][:-1])[0] == 403
        assert press(client, release, sure="")[0] == 400

    def test_other_site_under_its_own_name_is_refused_as_well(self, app: Celery, client: Client) -> None:
        """DNS rebinding: the browser sends the cookie of that name, and names it as host and origin."""
        sign_in(client)
        release, _ = forms(client, hold(app, "acme", process=over()))
        fields = {name: value for name, value in release.items() if name != "action"}
        evil = {"host": "evil.example:9809", "origin": "http://evil.example:9809"}
        assert client.post("/release", data=fields, headers=evil).status_code == 421

    def test_session_ends(self, client: Client, monkeypatch: pytest.MonkeyPatch, app: Celery) -> None:
        sign_in(client)
        lease = hold(app, "acme")
        release, _ = forms(client, lease)
        wall = clock.wall
        with monkeypatch.context() as patch:
            patch.setattr(clock, "wall", lambda: wall() + access.SESSION + 1)
            assert press(client, release)[0] == 403

    def test_sign_out_ends_it_in_the_browser(self, client: Client) -> None:
        sign_in(client)
        page = Page(client.get("/login").text)
        (proof,) = (it.attributes["value"] for it in page.all("input") if it.attributes.get("name") == "proof")
        assert client.post("/logout", data={"proof": ""}, headers={"origin": client.origin}).status_code == 403
        answer = client.post("/logout", data={"proof": proof}, headers={"origin": client.origin})
        assert answer.status_code == 303
        assert f'{COOKIE}=""; expires=' in answer.headers["set-cookie"]

    def test_session_is_found_among_other_cookies(self, client: Client) -> None:
        sign_in(client)
        (session,) = client.cookies.values()
        client.cookies = {}
        for jar in (f"a=1; {COOKIE}={session}; b=2", f"{COOKIE}={session}", f"=;;x; {COOKIE}={session}"):
            assert "You are signed in" in client.get("/login", headers={"cookie": jar}).text

    def test_hostile_cookie_is_parsed_quickly(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Python's own parser needs seconds for such a cookie (CVE-2024-7592), and would block everybody."""
        monkeypatch.setattr(cookies.SimpleCookie, "load", lambda *_: pytest.fail("Python's parser is used"))
        long = COOKIE + '="' + "\\a" * 30_000 + '"'
        assert client.get("/login", headers={"cookie": long}).status_code == 200

    @pytest.mark.parametrize("cookie", ["", "x", "1.2.3", "é", '";', f"{COOKIE}={'x' * 5000}"])
    def test_nonsense_is_not_a_session(self, client: Client, cookie: str) -> None:
        answer = client.get("/login", headers={"cookie": f"{COOKIE}={cookie}".encode()})
        assert answer.status_code == 200
        assert "You are signed in" not in answer.text

    def test_long_form_is_ignored(self, client: Client) -> None:
        fields = {"token": TOKEN, "more": "x" * 100_000}
        assert client.post("/login", data=fields, headers={"origin": client.origin}).status_code == 403

    def test_form_with_many_fields_is_ignored(self, client: Client) -> None:
        fields = {"token": TOKEN, **{str(number): "" for number in range(20)}}
        assert client.post("/login", data=fields, headers={"origin": client.origin}).status_code == 403


class TestWrongTokens:
    @pytest.fixture(autouse=True)
    def time(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """A list of one entry: the time, which a test advances."""
        passed = [1000.0]
        monkeypatch.setattr(clock, "now", lambda: passed[0])
        return passed

    def test_after_a_few_the_address_has_to_wait_for_a_moment(self, client: Client, time: list[float]) -> None:
        assert [sign_in(client, "wrong") for _ in range(FREE)] == [403] * FREE
        answer = client.post("/login", data={"token": TOKEN}, headers={"origin": client.origin})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, f"{PAUSE:g}")
        assert "Try again in 5 s." in answer.text
        assert client.cookies == {}
        time[0] += PAUSE
        assert sign_in(client) == 303

    def test_wait_does_not_grow(self, client: Client, time: list[float]) -> None:
        for _ in range(3 * FREE):
            sign_in(client, "wrong")
        time[0] += PAUSE
        assert sign_in(client) == 303

    def test_signed_in_users_notice_nothing(self, app: Celery, client: Client) -> None:
        sign_in(client)
        release, _ = forms(client, hold(app, "acme", process=over()))
        stranger = client_of(app)
        stranger._app = client._app
        for _ in range(2 * FREE):
            sign_in(stranger, "wrong")
        assert press(client, release)[1] == f"Released: {HOLDER}: {Verdict.OVER.fact}."

    def test_wrong_tokens_of_programs_count_as_well(self, app: Celery) -> None:
        client = client_of(app, private=True)
        wrong = [client.get("/metrics", headers={"authorization": "Bearer x"}).status_code for _ in range(FREE + 1)]
        assert wrong == [401] * FREE + [429]
        assert client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 429
        assert client.get("/metrics").status_code == 401
        assert sign_in(client) == 429
        assert client.get("/login").status_code == 200

    def test_only_so_many_addresses_are_told_apart(self, time: list[float]) -> None:
        tries = Tries()
        for _ in range(FREE):
            tries.failed("evil")
        assert tries.wait("evil") == PAUSE
        assert tries.wait("good") == 0
        for number in range(MOST_ADDRESSES + 100):
            tries.failed(f"evil {number}")
        assert len(tries._forgotten_at) <= MOST_ADDRESSES + 1
        assert tries.wait("one more") == tries.wait("another") > 0
        time[0] += MOST_ADDRESSES * PAUSE
        assert tries.wait("one more") == 0
        assert len(tries._forgotten_at) == 0


class TestPrivate:
    @pytest.fixture
    def client(self, app: Celery) -> Client:
        hold(app, "acme")
        return client_of(app, private=True, allow_release=False)

    @pytest.mark.parametrize("address", ["/", "/locks", "/doctor", "/search?q=x", "/nowhere"])
    def test_pages_redirect_to_the_login(self, client: Client, address: str) -> None:
        answer = client.get(address)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert sign_in(client) == 303
        assert client.get(address).headers.get("location") != "/login"

    @pytest.mark.parametrize("address", ["/metrics", "/stream?at=locks"])
    def test_programs_send_the_token(self, client: Client, address: str) -> None:
        for value in ("", "Bearer x", TOKEN, f"Basic {TOKEN}"):
            assert client.get(address, headers={"authorization": value}).status_code == 401
        if address == "/metrics":
            assert client.get(address, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200

    def test_login_shows_nothing_of_the_locks(self, client: Client) -> None:
        answer = client.get("/login")
        assert answer.status_code == 200
        assert "acme" not in answer.text


def test_session_of_another_token_does_not_count() -> None:
    one, other = (Access(["localhost"], token=token) for token in (TOKEN, TOKEN + "2"))
    assert one.is_session(one.new_session())
    assert not other.is_session(one.new_session())
    assert not Access(["localhost"]).is_session(one.new_session())
