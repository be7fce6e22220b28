"""The page beside Django, as the how-to says: docs/howto/live-page.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.patience import LIMIT, until
from tests.redis_server import RedisServer

HOW_TO = Path(__file__).parents[2] / "docs" / "howto" / "live-page.md"

SETTINGS = """
import os
SECRET_KEY = "x"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = [f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages", "sessions")]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
PROCESSORS = [f"django.{name}" for name in (
    "template.context_processors.request", "contrib.auth.context_processors.auth",
    "contrib.messages.context_processors.messages",
)]
BACKEND = "django.template.backends.django.DjangoTemplates"
TEMPLATES = [{"BACKEND": BACKEND, "APP_DIRS": True, "OPTIONS": {"context_processors": PROCESSORS}}]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CELERY_BROKER_URL = os.environ["REDIS"]
"""

URLS = """
from django.contrib import admin
from django.http import HttpResponse
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls), path("", lambda request: HttpResponse("the shop"))]
"""

CELERY = """
from celery import Celery
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
"""

USERS = """
import django
django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
call_command("migrate", verbosity=0)
User.objects.create_superuser("boss", password="a-password")
User.objects.create_user("customer", password="a-password")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shop that serves the page as the how-to says."""
    folder = tmp_path_factory.mktemp("django")
    (recipe,) = re.findall(r"```python\n(# shop/asgi\.py\n.*?)```", HOW_TO.read_text(), re.DOTALL)
    files = {"__init__": "", "settings": SETTINGS, "urls": URLS, "celery": CELERY, "asgi": recipe}
    (folder / "shop").mkdir()
    for name, text in files.items():
        (folder / "shop" / f"{name}.py").write_text(text)
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    env["PYTHONPATH"] = f"{folder}:{Path(__file__).parents[2]}"
    subprocess.run([sys.executable, "-c", USERS], cwd=folder, env={**env, "REDIS": ""}, check=True)
    command = [sys.executable, "-m", "uvicorn", "--port", "0", "shop.asgi:application"]
    output = folder / "output"
    with RedisServer() as server, output.open("w") as log:
        env["REDIS"] = server.url
        program = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            running = re.compile(r"running on (http://\S+)")
            until(lambda: running.search(output.read_text()) is not None or program.poll() is not None)
            (found,) = running.findall(output.read_text())
            yield found.replace("127.0.0.1", "localhost")
        finally:
            program.send_signal(signal.SIGTERM)
            program.wait(LIMIT)


@contextmanager
def logged_in(url: str, user: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=LIMIT) as client:
        client.get("/admin/login/")
        fields = {"username": user, "password": "a-password", "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        client.post("/admin/login/", data=fields)
        yield client


@pytest.mark.slow
def test_page_is_shown_to_staff(url: str) -> None:
    with logged_in(url, "boss") as boss:
        shown = boss.get("/locks/")
        assert shown.status_code == 200
        assert "<h1>Overview</h1>" in shown.text
        assert 'href="/locks/page.css"' in shown.text
        assert boss.get("/locks/page.css").status_code == 200
        assert boss.get("/locks/").headers["content-security-policy"]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["/locks/", "/locks/page.css", "/locks/search?q=x"])
def test_others_are_sent_to_the_login(url: str, address: str) -> None:
    with logged_in(url, "customer") as customer, httpx.Client(base_url=url, timeout=LIMIT) as stranger:
        for client in (customer, stranger):
            answer = client.get(address)
            assert (answer.status_code, answer.headers["location"]) == (307, "/admin/login/?next=/locks/")


@pytest.mark.slow
def test_rest_is_answered_by_django(url: str) -> None:
    assert httpx.get(url, timeout=LIMIT).text == "the shop"
    assert "Log in" in httpx.get(f"{url}/admin/login/", timeout=LIMIT).text
