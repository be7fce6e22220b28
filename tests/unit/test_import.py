"""What `import celery_singleton_lock` costs a web process that only sends tasks."""

from __future__ import annotations

import subprocess
import sys

#: A program needs none of these before it sends a task.
HEAVY = ("redis", "opentelemetry", "prometheus_client", "sqlalchemy", "pytest", "rich", "starlette", "jinja2")


def test_import_loads_no_heavy_library() -> None:
    program = f"import sys, celery_singleton_lock; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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
