"""What it costs to import the package, and that nothing is connected to by that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.measure import Result, Rounds, Row, Table

CELERY = "celery and an app on Redis"

#: What is imported after that.
CONTESTANTS: Mapping[str, str] = {
    "ours: celery_singleton_lock": "import celery_singleton_lock",
    "celery-singleton": "import celery_singleton",
    "celery-once": "import celery_once",
}

#: An app's tasks module without us: after it, what Celery and kombu need of their own is there.
_APP = "from celery import Celery, Task; app = Celery(broker='redis://127.0.0.1:1'); app.task(lambda: None, name='t')"

_TRANSPORT = "import kombu.transport.redis"

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
        _table("Import, after an app on Redis was made", f"{_APP}; {_TRANSPORT}", rounds),
    ]
    connects = _python(_AUDITED.format(first=_APP, then=CONTESTANTS["ours: celery_singleton_lock"]))
    notes = [
        f"{rounds} fresh interpreters each; the ratio is to the time of Celery's own import, an app with one task and"
        " kombu's Redis transport.",
        "Much of what comes after a bare `import celery` is Celery: it loads its parts when they are first used.",
        f"Importing ours and making an exclusive task, with no server there: {connects} connects or look-ups of hosts"
        " (by the interpreter's audit events).",
    ]
    return Result("import", "Import", tables, notes)


def _table(title: str, first: str, rounds: int) -> Table:
    measured = Rounds(CELERY)
    modules: dict[str, int] = {}

    def turn(name: str) -> float:
        _, taken, modules[name] = json.loads(_python(_TIMED.format(first=first, then=CONTESTANTS[name])))
        return float(taken)

    def whole() -> float:
        return float(json.loads(_python(_TIMED.format(first=f"{_APP}; {_TRANSPORT}", then="")))[0])

    measured.run(rounds, {CELERY: whole, **{name: lambda name=name: turn(name) for name in CONTESTANTS}})
    rows = [
        Row(
            name,
            measured.ratio(name),
            {"ms": f"{measured.median(name) * 1000:.1f}", "modules": str(modules.get(name, ""))},
        )
        for name in (CELERY, *CONTESTANTS)
    ]
    return Table(title, CELERY, rows)


def _python(code: str) -> str:
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return shown.stdout.strip()
