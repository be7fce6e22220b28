"""What is shown of a mistyped URL: never a password or a user."""

from __future__ import annotations

import traceback

import pytest
from celery import Celery
from hypothesis import assume, example, given
from hypothesis import strategies as st

from celery_singleton_lock.backend import SCHEMES, Backend, Kind, is_readable, masked
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings, problems
from celery_singleton_lock.stores import open_store

#: Parts of a password and a user that nobody may see, whatever surrounds them.
PASSWORD, USER = "hunter2", "alice7"

#: Characters that people get wrong, and that passwords contain.
noise = st.text("@:/?#;%=&[]\\ .é℀0129ab", max_size=4)


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A URL with a user and a password, mistyped in any way."""
    scheme = draw(st.sampled_from([*SCHEMES, "http", "rdis", ""]))
    between = draw(st.sampled_from(["://", ":/", "//", ":", "", ":///"]))
    login = f"{draw(noise)}{USER}{draw(noise)}:{draw(noise)}{PASSWORD}{draw(noise)}"
    at = draw(st.sampled_from(["@", "@", "@", "%40", "@@"]))
    host = draw(st.sampled_from(["h", "h:6379", "h:x", "[::1]:1", "[::", "h:99999", ""]))
    rest = draw(st.sampled_from(["", "/0", "/x", "/0?db=1", "?x=1", "#f", "/0?ssl_cert_reqs=no"]))
    one = f"{scheme}{between}{login}{at}{host}{rest}"
    return one + draw(st.sampled_from(["", "", ";redis://b;redis://c", ";", f";{one}b;{one}c"]))


def told_of(url: str) -> str:
    """Everything that is said about a setting with this URL, however far it gets."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = url
    said = [masked(url), *(str(problem) for problem in problems(app))]
    try:
        settings = Settings.from_app(app)
        said += [settings.backend.masked, repr(settings.backend), repr(settings)]
        store = open_store(settings)
        said += [store.server, repr(store)]
    except InvalidOption as error:
        # A traceback shows the cause and the context.
        said += [str(error), repr(error), "".join(traceback.format_exception_only(error)), repr(error.__cause__)]
        said += [] if error.__suppress_context__ else [repr(error.__context__)]
    return "\n".join(said)


@given(mangled())
@example(f"redis:/{USER}:{PASSWORD}@h")
@example(f"{USER}:{PASSWORD}@h:6379/0")
@example(f"redis://{USER}:{PASSWORD}/x@h")
@example(f"redis://{USER}:{PASSWORD}#x@h")
@example(f"redis://{USER}:{PASSWORD}?x=1@h")
@example(f"redis://:12?{PASSWORD}=1@h")
@example(f"redis://:{PASSWORD};x@h")
@example(f"redis://:x;{PASSWORD}@h")
@example(f"redis://:1;redis://{PASSWORD}@h")
@example(f"redis://:{PASSWORD}%40h")
@example(f"redis://:{PASSWORD}\u2100@h")
@example(f"redis+cluster://:{PASSWORD}@h:x")
@example(f"redis+cluster://h/{PASSWORD}@x")
@example(f"unix://{USER}:{PASSWORD}/tmp/redis.sock")
@example(f"redis+socket:///tmp/{PASSWORD}@redis.sock")
@example(f"sentinel://:{PASSWORD}@[::")
def test_neither_password_nor_user_is_shown(url: str) -> None:
    said = told_of(url)
    assert PASSWORD not in said
    if "@" in url:
        assert USER not in said, "without an @, a user looks like a host"


@given(st.text())
def test_any_text_can_be_shown(text: str) -> None:
    masked(text)
    is_readable(text)


@given(st.text(min_size=5).filter(lambda text: "\u2026" not in text))
def test_nothing_before_the_last_at_sign_is_shown(secret: str) -> None:
    assume(secret not in "redis://**@h/0")
    assert secret not in masked(f"redis://{secret}@h/0")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("rediss://u:p@h:6379/0?ssl_cert_reqs=none", "rediss://**@h:6379/0?\u2026"),
        ("redis://:p@ss@h", "redis://**@h"),
        ("redis://:p@my_host.example:1/2;redis://:p@b/2", "redis://**@my_host.example:1/2;redis://**@b/2"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("unix:///tmp/redis.sock?db=1", "unix:///tmp/redis.sock?\u2026"),
        ("redis+socket://:p@/tmp/redis.sock", "redis+socket://**@/tmp/redis.sock"),
        ("sentinel://a:26379;sentinel://b:26379", "sentinel://a:26379;sentinel://b:26379"),
        ("memory://", "memory://"),
        ("http://h:8080", "http://h:8080"),
        ("http://:p@h", "\u2026"),
        ("h:6379", "\u2026"),
    ],
)
def test_valid_parts_are_shown(url: str, expected: str) -> None:
    assert masked(url) == expected


@pytest.mark.parametrize(
    ("urls", "kind"),
    [
        ("memory://", Kind.MEMORY),
        ("redis://h", Kind.SERVER),
        ("rediss://h", Kind.SERVER),
        ("redis+socket:///run/redis.sock", Kind.SERVER),
        ("unix:///run/redis.sock", Kind.SERVER),
        ("sentinel://a", Kind.SENTINEL),
        ("sentinel://a;sentinel://b", Kind.SENTINEL),
        ("redis+cluster://a", Kind.CLUSTER),
        ("rediss+cluster://a;rediss+cluster://b", Kind.CLUSTER),
        ("redis://a;rediss://b;unix:///c", Kind.REDLOCK),
    ],
)
def test_schemes_in_any_case_determine_the_kind(urls: str, kind: Kind) -> None:
    for spelling in (urls, urls.upper(), urls.title()):
        found = Backend.parse(spelling)
        assert found.kind is kind
        assert [url.partition("://")[0] for url in found.urls] == [url.partition("://")[0] for url in urls.split(";")]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_in_upper_case_opens_the_same_store(scheme: str) -> None:
    """`MEMORY://` passed the check of the settings, and failed when the store was opened."""
    stores, places = [], {"memory": "", "unix": "/run/redis.sock", "redis+socket": "/run/redis.sock"}
    for spelling in (scheme, scheme.upper()):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.singleton_lock_backend = spelling + "://" + places.get(scheme, "h")
        app.conf.singleton_lock_transport_options = {"master_name": "m"} if scheme == "sentinel" else {}
        stores.append(open_store(Settings.from_app(app)))
    one, other = stores
    assert (type(one), one.server) == (type(other), other.server)


def test_repeated_url_is_not_a_second_node() -> None:
    with pytest.raises(ValueError, match="each named once"):
        Backend.parse("redis://a;REDIS://a;redis://b")


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://h:1/x",
        "redis+cluster://h:99999",
        "redis+cluster://h:x",
        "redis://h/x",
        "redis://[::",
        "redis://h:x",
    ],
)
def test_wrong_urls_are_clear_errors(url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = url
    with pytest.raises(InvalidOption, match="singleton_lock_backend is"):
        open_store(Settings.from_app(app))


def test_error_says_how_to_write_a_password() -> None:
    with pytest.raises(InvalidOption, match="%2F"):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.singleton_lock_backend = "redis://:pass/word@h"
        Settings.from_app(app)


def test_transport_options_are_not_shown() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_transport_options = f"password={PASSWORD}"
    with pytest.raises(InvalidOption) as caught:
        Settings.from_app(app)
    assert PASSWORD not in str(caught.value)
    assert PASSWORD not in "".join(map(str, problems(app)))
