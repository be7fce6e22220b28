"""The code in docs/fencing.md runs as it stands, and refuses a stale write."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from celery import Celery, _state
from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_singleton_lock import SingletonTask, StaleFence
from celery_singleton_lock.contrib.fencing import check_fence
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]


def code_of(section: str) -> str:
    text = (ROOT / "docs" / "fencing.md").read_text()
    found = re.search(rf"\n## {section}\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert found, section
    return found[1]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    # Celery would give the tasks to every app that other tests make.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    app = Celery("docs", broker="memory://", set_as_current=False)
    app.conf.task_eager_propagates = True
    return app


def run(section: str, **names: Any) -> dict[str, Any]:
    names = {"SingletonTask": SingletonTask, "__name__": "docs", **names}
    exec(compile(code_of(section), f"fencing.md, {section}", "exec", dont_inherit=True), names)
    return names


SITE = """
import django
from django.conf import settings
from django.core.management import call_command

database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(INSTALLED_APPS=["bills"], DATABASES={"default": database}, USE_TZ=True)
django.setup()
call_command("makemigrations", "bills", verbosity=0)
call_command("migrate", verbosity=0)

from bills.models import Bill, StaleFence, app, bill, fenced_update

app.conf.task_eager_propagates = True
bill.apply((7, 3))
row = Bill.objects.get()
print(row.tenant_id, row.total, row.fence > 0)
for stale in (row.fence - 1, 0):
    try:
        fenced_update(Bill.objects.filter(tenant_id=7), stale, total=9)
    except StaleFence as error:
        print(error.target, Bill.objects.get().total)
"""


def test_docs_of_django_run(tmp_path: Path) -> None:
    head = "from celery import Celery\nfrom celery_singleton_lock import SingletonTask\n\napp = Celery(broker='memory://')\n"
    (tmp_path / "bills").mkdir()
    (tmp_path / "bills" / "__init__.py").touch()
    (tmp_path / "bills" / "models.py").write_text(head + code_of("Django"))
    command = [sys.executable, "-c", SITE]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.stdout, ended.stderr) == ("7 4 True\nbills.Bill 4\nbills.Bill 4\n", "")


def test_docs_of_sqlalchemy_run(app: Celery) -> None:
    engine = create_engine("sqlite://")
    names = run("SQLAlchemy", app=app, engine=engine)
    names["Base"].metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(names["Account"](tenant_id=7, total=0))
    names["charge"].apply((7, 3))
    with Session(engine) as session:
        account = session.get(names["Account"], 7)
        assert account is not None
        assert account.total == 4
        assert account.fence > 0
    for stale in (account.fence - 1, 0):
        with Session(engine) as session, pytest.raises(StaleFence):
            names["fenced_update"](session, stale, names["Account"], names["Account"].tenant_id == 7, total=9)
    with Session(engine) as session:
        assert session.get_one(names["Account"], 7).total == 4
    engine.dispose()


def test_docs_of_redis_run(app: Celery, redis_server: RedisServer) -> None:
    with Redis.from_url(redis_server.url_of(5)) as client:
        names = run("Redis", app=app, client=client)
        names["publish"].apply((7, "text"))
        assert client.get("page:7") == b"text"
        fence = int(client.get("{page:7}:fence") or 0)
        assert client.ttl("{page:7}:fence") > client.ttl("page:7") > 0
        for stale in (fence - 1, 0):
            with pytest.raises(StaleFence):
                names["fenced_set"](stale, "page:7", "stale", 60)
        assert client.get("page:7") == b"text"
        client.flushdb()


def test_docs_of_s3_run(app: Celery) -> None:
    class Missing(Exception):
        response: ClassVar = {"ResponseMetadata": {"HTTPStatusCode": 404}}

    class Store:
        """A store of one object, as far as the example needs it."""

        exceptions = SimpleNamespace(ClientError=Missing)
        put: ClassVar[dict[str, Any]] = {}

        def head_object(self, **_: Any) -> Any:
            if not self.put:
                raise Missing
            return {"Metadata": self.put["Metadata"], "ETag": '"1"'}

        def put_object(self, **put: Any) -> None:
            assert put.get("IfMatch") == ('"1"' if self.put else None)
            assert put.get("IfNoneMatch") == (None if self.put else "*")
            self.put = put

    store = Store()
    names = run("S3", app=app, s3=store)
    for _ in range(2):
        names["export"].apply((7, b"rows"))
    assert store.put["Key"] == "7.csv"
    with pytest.raises(StaleFence):
        names["fenced_put"](int(store.put["Metadata"]["fence"]) - 1, "exports", "7.csv", b"stale")


def test_docs_of_a_custom_guard_run() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE ledger (tenant_id, total, fence)")
    connection.execute("INSERT INTO ledger VALUES (7, 0, 0)")
    write = run("Elsewhere")["write"]
    write(connection, 2, 7, 20)
    with pytest.raises(StaleFence):
        write(connection, 1, 7, 10)
    with pytest.raises(StaleFence):
        write(connection, 0, 7, 0)
    assert connection.execute("SELECT total FROM ledger").fetchall() == [(20,)]
    connection.close()


@pytest.mark.parametrize("fence", [1.0, True, "7", None])
def test_a_fence_is_a_whole_number(fence: Any) -> None:
    with pytest.raises(TypeError, match="fence for ledger"):
        check_fence("ledger", fence)
