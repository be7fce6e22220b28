"""The files to change: the scripts of locks, and the protocol's Python modules."""

from __future__ import annotations

from pathlib import Path

from tests.mutation import lua, python
from tests.mutation.change import Change

ROOT = Path(__file__).parents[2]

_PACKAGE = "celery_singleton_lock"
_REDIS = f"{_PACKAGE}/stores/redis"
_MODULES = {
    _PACKAGE: "trust lease heartbeat batches in_bulk",
    f"{_PACKAGE}/task": "acquisition run redelivery refusal settling",
    _REDIS: "store lock_commands lock_answers outbox waiter",
    f"{_REDIS}/redlock": "store votes conversation majority commands",
}
FILES = (
    *(f"{room}/{name}.py" for room, names in _MODULES.items() for name in names.split()),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / _REDIS / "scripts").glob("l*/*.lua")),
)


def changes() -> list[Change]:
    """All possible changes, in the order of the files."""
    return [
        Change(file, text, edit)
        for file in FILES
        for text in [(ROOT / file).read_text()]
        for edit in (lua if file.endswith(".lua") else python).edits(text)
    ]
