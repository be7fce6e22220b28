"""A Django project with an admin; `python -m tests.web.django_site URL` prints what people see of it."""

from __future__ import annotations

import json
import sys
from io import StringIO
from typing import Any

import django
from celery import Celery
from django.conf import settings
from django.contrib import admin
from django.urls import path


def configure(url: str) -> Celery:
    settings.configure(
        SECRET_KEY="of-the-tests",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF=__name__,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "celery_singleton_lock.contrib.django",
            "celery_singleton_lock.web.django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        STATIC_URL="/static/",
        CELERY_BROKER_URL=url,
        CELERY_RESULT_BACKEND=url,
    )
    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    django.setup()
    return app


urlpatterns = [path("admin/", lambda request: None)]


def main(url: str) -> None:
    from tests.web.scenes import HOSTILE, TASK, entry, hold, with_task, write

    app = with_task(configure(url))
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    urlpatterns[:] = [path("admin/", admin.site.urls)]
    call_command("check", fail_level="WARNING")
    call_command("migrate", run_syncdb=True, verbosity=0)
    said = StringIO()
    call_command("makemigrations", dry_run=True, stdout=said)
    call_command("check")
    lease = hold(app, "acme")
    hold(app, "evil", label=HOSTILE, task_id=HOSTILE, node=HOSTILE)
    write(app, entry(app, "acme"), entry(app, "acme", "skip", holder="the-holder", label=HOSTILE))
    base = "/admin/celery_singleton_lock_web/exclusivelock/"
    addresses = ["", "locks", "locks?q=acme", "tasks", "timeline", "refused", "beat", "doctor", f"task?name={TASK}"]
    addresses += [f"lock?key={lease.key}", "id?id=id-of-acme", "page.css", "search?q=acme", "nowhere", "lock?key=x"]
    people: dict[str, Any] = {
        "nobody": None,
        "customer": User.objects.create_user("customer"),
        "staff": User.objects.create_user("staff", is_staff=True),
    }
    found: dict[str, Any] = {"migrations": said.getvalue(), "pages": {}}
    for name, user in people.items():
        client = Client()
        if user is not None:
            client.force_login(user)
        found["pages"][name] = {
            address: [answer.status_code, answer.headers.get("Location", ""), answer.content.decode()]
            for address in addresses
            for answer in [client.get(base + address)]
        }
        found[name] = {
            "index": client.get("/admin/", follow=True).content.decode(),
            "post": client.post(base).status_code,
            "add": client.get(f"{base}add/").status_code,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
