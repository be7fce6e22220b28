"""What `import celery_singleton_lock` costs a web process that only sends tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A program needs none of these before it sends a task.
HEAVY = ("redis", "opentelemetry", "prometheus_client", "sqlalchemy", "pytest", "rich", "starlette", "jinja2")


def test_import_loads_no_heavy_library() -> None:
    program = f"import sys, celery_singleton_lock; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


OLD_CELERY = """
import celery
celery.VERSION, celery.__version__ = celery.version_info_t(5, 3, 6, "", ""), "5.3.6"
import celery_singleton_lock
"""


def test_older_celery_is_named_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_CELERY], capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert said == "ImportError: celery_singleton_lock needs Celery 5.4 or newer, found 5.3.6"


#: Something that a library of the page needs is not installed; and then one of them is not.
MISSING = """
import sys
sys.modules[{name!r}] = None
import celery_singleton_lock.web
"""


@pytest.mark.parametrize(("name", "is_blamed"), [("anyio", False), ("jinja2", True), ("uvicorn", True)])
def test_extra_is_named_only_for_what_it_installs(name: str, is_blamed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING.format(name=name)], capture_output=True, text=True, check=False
    )
    said = done.stderr.splitlines()[-1]
    assert name in said
    assert ("celery-singleton-lock[web]" in said) == is_blamed


#: The interpreter's audit hooks see every connect of a socket, and every look-up of a host.
AUDITED = """
import sys
seen = []
sys.addaudithook(lambda event, args: event in ("socket.connect", "socket.getaddrinfo") and seen.append(event))
from celery import Celery
from celery_singleton_lock import SingletonTask
app = Celery(broker="redis://127.0.0.1:1")
@app.task(base=SingletonTask)
def work() -> None: ...
app.finalize()
print(seen)
"""


def test_import_and_an_exclusive_task_connect_to_nothing() -> None:
    shown = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"
