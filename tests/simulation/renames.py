"""Renames each name of the package's inside that the simulator knows, in a copy of the package and there everywhere: a
simulation must fail, and say which name it misses. `python -m tests.simulation.renames` does all of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.simulation import inside
from tests.simulation.plan import draw

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "celery_singleton_lock"

#: Ends a name that is renamed.
_NEW = "_renamed"

#: The plans that are simulated, by kind and seed: together they carry each part of a header, and of a key.
PLANS = (
    *(("tasks", 25), ("sent", 0), ("joined", 21), ("newest", 1), ("follows", 0), ("beats", 2), ("nodes", 0)),
    *(("lines", 66), ("lines", 6003), ("tasks", 3624)),
)

#: Where lists in a header are written and read.
_LISTS = {
    "joins": (("requeue", "list(joins)"), ("requeue", 'known["joins"]')),
    "waits": (("requeue", "list(carried.waits)"), ("requeue", 'known.get("waits")')),
    "leader": (
        *(("requeue", "follows.header()"), ("requeue", 'known["leader"]')),
        *(("queue_lock", "self.follows.header()"), ("queue_lock", "part[_FIELDS + 1]")),
    ),
    "queue": (("sending", "lock.part(task.name)"), ("queue_lock", 'carried["queue"]')),
}

#: The parts of `put_back` that say how a copy goes.
_OF_WAY = ("exchange", "routing_key")

#: An expression with two places exchanged.
_EXCHANGED = "(lambda it: [*it[:{0}], it[{0} + 1], it[{0}], *it[{0} + 2:]] if it and len(it) > {0} + 1 else it)({1})"


class Rename(NamedTuple):
    """A renaming.

    Attributes:
        name: that must be in the message.
        pattern, new: what replaces what, in all texts of the package whose paths match `files`.
        module: that is renamed, with its path in the package.
    """

    name: str
    pattern: str
    new: str | Callable[[re.Match[str]], str]
    files: str = r"\.py$"
    module: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.renames", description=__doc__)
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--search", action="store_true", help="look for a failure in this process; prints JSON")
    given = parser.parse_args()
    if given.search:
        print(json.dumps(_search()))
        return 0
    blind = 0
    with TemporaryDirectory() as folder:
        for rename in every():
            if not given.names or rename.name in given.names:
                seed, message = found(rename, Path(folder))
                is_seen = seed is not None and rename.name in message
                blind += not is_seen
                print(f"{rename.name:24} {seed or '':12} {'' if is_seen else 'NOT SEEN '}{message}", flush=True)
    return 1 if blind else 0


def every() -> Iterator[Rename]:
    """Each rename: the names are those in the text of `inside`."""
    for kind in (inside.Header, inside.PutBack):
        for field in fields(kind):
            yield _of_field(field.name, is_put_back=kind is inside.PutBack)
    for name, (kind, _) in inside.LISTS.items():
        for at in range(len(kind.__annotations__) - 1):
            files = "|".join(sorted({f"task/{file}.py" for file, _ in _LISTS[name]}))
            texts = "|".join(re.escape(text) for _, text in _LISTS[name])
            yield Rename(name, rf"(?<![\w.])({texts})(?! = )", _EXCHANGED.format(at, r"\1"), files)
    for part in sorted(inside.PARTS - {""}):
        begins = r"((?<=:)|(?<=_beside\(key, [\"'])|(?<=_beside\(key, f[\"']))"
        yield Rename(part, rf"{begins}{part}(?=[:*\"'])", part + _NEW, "")
    tree = ast.parse(Path(inside.__file__).read_text())
    for name in sorted(_attributes(tree)):
        yield Rename(name, rf"\b{name}\b", name + _NEW)
    for module in sorted(_modules(tree)):
        yield _of_module(module)


def _of_field(name: str, *, is_put_back: bool) -> Rename:
    files = r"(task|worker|beat)/\w+\.py$"
    if is_put_back and name not in ("conflict", "unavailable", "lost", "follows"):  # Reasons are arguments.
        files = r"task/(requeue|header)\.py$" if name not in _OF_WAY else r"task/(original|delivery)\.py$"
    quoted = rf"(?<!headers\.get\()(?<!headers\[)(?<![b\w])([\"']){name}\1"
    of_tick = rf"\b{name}(?==(?:tick|entry)\.)"
    return Rename(name, f"{quoted}|{of_tick}", rf"\g<1>{name}{_NEW}\g<1>", files)


def _of_module(path: str) -> Rename:
    parent, _, leaf = f"{_PACKAGE}.{path}".rpartition(".")
    dotted = rf"(?<={re.escape(parent)}\.){leaf}\b"
    imported = rf"(?<=from {re.escape(parent)} import )((?:\([^)]*|[^\n(]*)?\b){leaf}\b"

    def new(found: re.Match[str]) -> str:
        return f"{leaf}{_NEW}" if found[1] is None else f"{found[1]}{leaf}{_NEW} as {leaf}"

    return Rename(leaf, rf"{imported}|{dotted}", new, module=path)


def _attributes(tree: ast.Module) -> set[str]:
    """The attributes that `inside` reads or sets, and what it imports from the package, but its modules."""
    named = {
        call.args[1].value for call in _calls(tree, "attribute", "assign") if isinstance(call.args[1], ast.Constant)
    }
    imported = {name for module, name in _imports(tree) if not _is_module(f"{module}.{name}")}
    return {str(name) for name in named | imported}


def _modules(tree: ast.Module) -> set[str]:
    """The modules that `inside` names, by their paths in the package."""
    named = {str(call.args[1].value) for call in _calls(tree, "module") if isinstance(call.args[1], ast.Constant)}
    of_imports = {it for module, name in _imports(tree) for it in (module, f"{module}.{name}") if _is_module(it)}
    return {*named, *of_imports, *inside.NEEDED} - {""}


def _calls(tree: ast.Module, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{_PACKAGE}."):
            yield from ((str(node.module).partition(".")[2], it.name) for it in node.names)


def _is_module(path: str) -> bool:
    place = _ROOT / _PACKAGE / path.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def found(rename: Rename, folder: Path) -> tuple[str | None, str]:
    """The plan that fails after a renaming, carried out in this folder, and how it fails."""
    copy, ignored = folder / _PACKAGE, shutil.ignore_patterns("__pycache__")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(_ROOT / _PACKAGE, copy, ignore=ignored)
    # Compiled texts of earlier renamings stay beside it.
    shutil.copytree(_ROOT / "tests/simulation", folder / "tests/simulation", ignore=ignored, dirs_exist_ok=True)
    (folder / "tests/__init__.py").touch()
    changes = 0
    for path in copy.rglob("*"):
        if path.suffix in (".py", ".lua") and re.search(rename.files, str(path)):
            text, count = re.subn(rename.pattern, rename.new, path.read_text())
            changes += count
            path.write_text(text)
    if rename.module:
        place = copy / rename.module.replace(".", "/")
        place = place if place.is_dir() else place.with_suffix(".py")
        place.rename(place.with_name(f"{place.stem}{_NEW}{place.suffix}"))
    if not changes:
        return None, "is not in the package"
    command = [sys.executable, "-m", "tests.simulation.renames", "--search"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    if ran.returncode:
        return "import", ran.stderr.strip().rpartition("\n")[2]
    seed, message = json.loads(ran.stdout.strip().rpartition("\n")[2])
    return seed, message


def _search() -> tuple[str | None, str]:
    """The first plan that fails, and how."""
    from tests.simulation.simulate import prepare, simulate

    prepare(processes=1, rounds=0)
    for kind, seed in PLANS:
        if (failure := simulate(draw(seed, kind=kind)).failure) is not None:
            return f"{kind} {seed}", failure
    return None, "all promises kept"


if __name__ == "__main__":
    sys.exit(main())
