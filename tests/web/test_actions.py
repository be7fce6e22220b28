"""Who may release locks and stop tasks, and what comes of it."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis.verdict import Verdict
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.web import app_of
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
    return Client(app_of(app, **{"token": TOKEN, "allow_release": True, **options}), password=TOKEN)


@pytest.fixture
def client(app: Celery) -> Client:
    return client_of(app)


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
    lease = hold(app, "acme", process=over())
    release, stop = forms(client, lease)
    assert (release["action"], stop["action"]) == ("/release", "/stop")
    assert press(client, release) == (200, f"Released: {HOLDER}: {Verdict.OVER.fact}.")
    assert not is_held(app, lease)


def test_lock_that_is_not_renewed_is_released(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = hold(app, "acme", ttl=50.0)
    release, _ = forms(client, lease)
    time = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: time[-1])
    monkeypatch.setattr(clock, "sleep", from_here_on(lambda _: time.append(time[0] + 47), clock.sleep))
    assert press(client, release) == (200, f"Released: {HOLDER}: {Verdict.LATE.fact}.")


def test_lock_of_a_live_holder_is_not_released(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("number", [0, 1], ids=["release", "stop"])
def test_forms_act_only_on_the_hold_that_was_seen(app: Celery, client: Client, number: int) -> None:
    seen = hold(app, "acme")
    form = forms(client, seen)[number]
    store = Runtime.of(app).store
    store.free(seen)
    later = hold(app, "acme", process=over())
    assert later.key == seen.key
    assert press(client, form) == (200, "The holder that you saw no longer holds it; nothing was done.")
    assert is_held(app, later)


@pytest.mark.parametrize("changed", [{"key": "x"}, {"mark": ""}, {"mark": "é"}])
def test_forms_that_were_tampered_with_do_nothing(app: Celery, client: Client, changed: dict[str, str]) -> None:
    lease = hold(app, "acme", process=over())
    for form in forms(client, lease):
        status, said = press(client, form, **changed)
        assert status == 200
        assert "nothing was done" in said
        assert is_held(app, lease)


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
    lease = hold(app, "acme")
    _, stop = forms(client, lease)
    assert press(client, stop)[1].startswith(said)
    (asked,) = control.asked
    assert (asked["destination"], asked["arguments"]) == (["one@web"], {"key": lease.key, "mark": stop["mark"]})


def test_lock_of_a_message_has_no_task_to_stop(app: Celery, client: Client) -> None:
    assert forms(client, hold(app, "acme", queued=True)) == []
    (only,) = forms(client, hold(app, "kept", pid=0))
    assert only["action"] == "/release"


class TestAccess:
    """Whoever has the token may act, if the page comes from here."""

    def test_nobody_may_act_without_the_switch(self, app: Celery) -> None:
        client = client_of(app, allow_release=False)
        lease = hold(app, "acme", ttl=60)
        assert forms(client, lease) == []
        for action in ("/release", "/stop"):
            answer = client.post(action, data={"key": lease.key, "sure": "yes"}, headers={"origin": client.origin})
            assert answer.status_code == 404

    def test_switch_needs_a_token(self, app: Celery) -> None:
        with pytest.raises(ValueError, match="allow_release needs a token: give one of at least 16 random characters"):
            app_of(app, allow_release=True)
        with pytest.raises(ValueError, match="the token has 5 characters; allowed: 16 or more"):
            app_of(app, token="short")

    @pytest.mark.parametrize("password", ["", "wrong-and-long-enough", TOKEN[:-1], f"{TOKEN} ", "é" * 20])
    @pytest.mark.parametrize("address", ["/", "/locks", "/page.css", "/search?q=x", "/nowhere"])
    def test_everything_needs_the_token(self, app: Celery, address: str, password: str) -> None:
        hold(app, "acme")
        answer = Client(app_of(app, token=TOKEN), password=password).get(address)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Basic realm="locks", charset="UTF-8"'
        assert "acme" not in answer.text
        assert Client(app_of(app, token=TOKEN), password=TOKEN).get(address).status_code != 401

    @pytest.mark.parametrize(
        "value",
        [
            *("", "Basic", "Basic x", "Basic é", "Basic =", f"Basic {TOKEN}", f"Bearer {TOKEN}", TOKEN),
            f"Bearer {base64.b64encode(f'x:{TOKEN}'.encode()).decode()}",
            f"Basic {base64.b64encode(TOKEN.encode()).decode()}",
            f"Basic {base64.b64encode(b'x:' + bytes([255] * 20)).decode()}",
        ],
    )
    def test_nonsense_is_not_the_token(self, app: Celery, value: str) -> None:
        client = Client(app_of(app, token=TOKEN))
        answer = client.get("/locks", headers={"authorization": value.encode()})
        assert answer.status_code == 401
        assert "The password is the token, with any user name (HTTP Basic)." in answer.text

    @pytest.mark.parametrize("user", ["", "me", "b\u00fcro"])
    def test_any_user_name_will_do(self, app: Celery, user: str) -> None:
        value = base64.b64encode(f"{user}:{TOKEN}".encode()).decode()
        answer = Client(app_of(app, token=TOKEN)).get("/locks", headers={"authorization": f"basic {value}"})
        assert answer.status_code == 200

    def test_without_a_token_none_is_asked_for(self, app: Celery) -> None:
        assert Client(app_of(app)).get("/locks").status_code == 200

    @pytest.mark.parametrize(
        "origin", ["http://evil.example", "null", "", "http://localhost:1", "https://localhost:9809.evil.example", None]
    )
    def test_form_of_another_site_is_refused(self, app: Celery, client: Client, origin: str | None) -> None:
        """The browser sends the password along with it."""
        lease = hold(app, "acme", process=over())
        for form in forms(client, lease):
            fields = {**form, "sure": "yes"}
            headers = {} if origin is None else {"origin": origin}
            answer = client.post(fields.pop("action"), data=fields, headers=headers)
            assert (answer.status_code, answer.text) == (403, "This page accepts only its own forms.\n")
        assert is_held(app, lease)

    def test_other_site_under_its_own_name_is_refused_as_well(self, app: Celery, client: Client) -> None:
        """DNS rebinding: the browser names that name as host and origin."""
        release, _ = forms(client, hold(app, "acme", process=over()))
        evil = {"host": "evil.example:9809", "origin": "http://evil.example:9809"}
        fields = {name: value for name, value in release.items() if name != "action"}
        assert client.post("/release", data=fields, headers=evil).status_code == 421

    def test_action_must_be_confirmed(self, app: Celery, client: Client) -> None:
        lease = hold(app, "acme", process=over())
        release, _ = forms(client, lease)
        assert press(client, release, sure="")[0] == 400
        assert press(client, release, more="x" * 100_000)[0] == 400, "a long form is ignored"
        assert press(client, release, **{str(number): "" for number in range(20)})[0] == 400, "and one of many fields"
        assert is_held(app, lease)


def test_each_action_is_logged_with_who_did_it(app: Celery, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    release, stop = forms(client, hold(app, "acme", process=over()))
    for form, said in (
        (release, f"release: Released: {HOLDER}: {Verdict.OVER.fact}."),
        (stop, "stop: The holder that you saw no longer holds it; nothing was done."),
    ):
        with caplog.at_level("WARNING"):
            press(client, form)
        (line,) = [it.getMessage() for it in caplog.records if it.name == "celery_singleton_lock.web.actions"]
        assert form["key"] in line
        assert f"somebody at 127.0.0.1 asked the page to {said}" in line
        caplog.clear()
