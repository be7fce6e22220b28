"""What it costs to import the package, and that nothing is connected to by that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.measure import Result, Rounds, Table

CELERY, OURS = "celery and an app on Redis", "ours: celery_singleton_lock"

#: An app's tasks module without us, and kombu's transport: after both, what Celery needs of its own is there.
_APP = "from celery import Celery, Task; app = Celery(broker='redis://127.0.0.1:1'); app.task(lambda: None, name='t')"
_WHOLE = f"{_APP}; import kombu.transport.redis"

#: What is imported after that.
CONTESTANTS: Mapping[str, str] = {
    OURS: "import celery_singleton_lock",
    "celery-singleton": "import celery_singleton",
    "celery-once": "import celery_once",
}

_TIMED = """
import json, sys, time
begun = time.perf_counter()
{first}
between = time.perf_counter()
known = len(sys.modules)
{then}
print(json.dumps([between - begun, time.perf_counter() - between, len(sys.modules) - known]))
"""

#: Every connect of any socket, and every look-up of a host, passes through the interpreter's audit.
_AUDITED = """
import sys
seen = []
sys.addaudithook(lambda event, args: event in ("socket.connect", "socket.getaddrinfo") and seen.append(event))
{first}
{then}
from celery_singleton_lock import SingletonTask
app.task(lambda: None, name="exclusive", base=SingletonTask)
print(len(seen))
"""


def run(*, quick: bool = False) -> Result:
    """Each run in a fresh interpreter, which imports Celery first, then the contestant."""
    rounds = 5 if quick else 20
    tables = [
        _table("Import, after a bare import of celery", "import celery", rounds),
        _table("Import, after an app on Redis was made", _WHOLE, rounds),
    ]
    connects = _python(_AUDITED, _APP, CONTESTANTS[OURS])
    notes = [
        f"{rounds} fresh interpreters each; the ratio is to the time of Celery's own import, an app with one task and"
        " kombu's Redis transport.",
        "Much of what comes after a bare `import celery` is Celery: it loads its parts when they are first used.",
        f"Importing ours and making an exclusive task, with no server there: {connects} connects or look-ups of hosts"
        " (by the interpreter's audit events).",
    ]
    return Result("import", "Import", tables, notes)


def _table(title: str, first: str, rounds: int) -> Table:
    modules = {CELERY: ""}

    def turn(name: str) -> float:
        if name == CELERY:
            return float(_python(_TIMED, _WHOLE, "")[0])
        _, taken, modules[name] = _python(_TIMED, first, CONTESTANTS[name])
        return float(taken)

    measured = Rounds(CELERY).run(rounds, [CELERY, *CONTESTANTS], turn)
    return measured.table(
        title, lambda name: {"ms": f"{measured.median(name) * 1000:.1f}", "modules": str(modules[name])}
    )


def _python(code: str, first: str, then: str) -> Any:
    command = [sys.executable, "-c", code.format(first=first, then=then)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(shown)
