"""Copies of the package, one for each simulated process: they import `fakes`, and before each statement of a function
there is a point at which the simulation may preempt it, or end it for good.

The code is compiled once, and each copy runs it anew: so each copy has its own classes and module state, like a
process. When a process ends, a later one gets its copy, which starts with the state that it had when it was loaded, and
like the child of a fork (`forks`).
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.machinery
import importlib.util
import marshal
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableSet
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from celery import Celery
from celery.utils.dispatch import Signal

from tests.simulation import fakes, inside
from tests.simulation.scheduler import active

PACKAGE = "celery_singleton_lock"
_ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "simulated_"
_OWN_TEXT = Path(__file__).read_text()

#: Changes the source of a file: a mutant.
Edit = Callable[[str, str], str]


def _counter() -> tuple[Callable[[], None], Callable[[int], int]]:
    left = 0  # A closure cell: counting there takes a third of the time of a class attribute.

    def point() -> None:
        """Called before a statement."""
        nonlocal left
        left -= 1
        if left < 0:
            run = active()
            if run is None or run.over:
                left = 1000
            else:
                run.point()
                left = run.until_preempted

    def reset(to: int) -> int:
        """Let this many statements pass before the next preemption; returns how many were left."""
        nonlocal left
        previous, left = left, to
        return previous

    return point, reset


point, _set_points_left = _counter()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """No point in this block counts: for objects that are made once, and found ready later."""
    left = _set_points_left(10**12)
    try:
        yield
    finally:
        _set_points_left(left)


class _AtEachStatement(ast.NodeTransformer):
    """Puts a point before each statement in a function."""

    def __init__(self) -> None:
        self._depth = 0

    def _function(self, node: Any) -> Any:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        if node.name != "__del__":
            node.body = _with_points(node.body)
        return node

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._depth and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                    setattr(node, field, _with_points(statements))
        return node


def _with_points(statements: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for number, statement in enumerate(statements):
        is_docstring = number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and not isinstance(statement, (ast.Nonlocal, ast.Global)):
            call = ast.Expr(ast.Call(ast.Name("__point__", ast.Load()), [], []))
            found.append(ast.fix_missing_locations(ast.copy_location(call, statement)))
        found.append(statement)
    return found


def _compiled(text: str, file: str) -> tuple[CodeType, set[str]]:
    """A module's code with points, and the names that its functions assign by `global`."""
    tree = ast.parse(text, file)
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return compile(ast.fix_missing_locations(_AtEachStatement().visit(tree)), file, "exec"), rebound


def _kept(text: str, file: str) -> tuple[CodeType, set[str]]:
    """The same, cached between programs as Python caches its bytecode."""
    made_of = hashlib.sha256(f"{sys.version}\0{_OWN_TEXT}\0{file}\0{text}".encode())
    kept = Path(__file__).parent / "__pycache__" / f"simulated-{made_of.hexdigest()[:32]}"
    with suppress(OSError, ValueError, EOFError, TypeError):
        code, rebound = marshal.loads(kept.read_bytes())
        return code, rebound
    compiled = _compiled(text, file)
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            kept.parent.mkdir(exist_ok=True)
            written = kept.with_name(f"{kept.name}.{os.getpid()}")
            written.write_bytes(marshal.dumps(compiled))
            written.replace(kept)
    return compiled


class _Source:
    """The package's code, compiled with points, from its files or a changed text of them."""

    def __init__(self) -> None:
        self._codes: dict[str, bytes] = {}
        self._rebound: dict[str, set[str]] = {}
        self.edit: Edit | None = None

    def load(self) -> None:
        """Compile everything: for a program that forks processes which each change little of it."""
        for file in (_ROOT / PACKAGE).rglob("*.py"):
            self._compile(str(file))

    def change(self, edit: Edit) -> None:
        """Recompile the files that this edit changes."""
        self.edit = edit
        for file in list(self._codes):
            text = Path(file).read_text()
            if edit(str(Path(file).relative_to(_ROOT)), text) != text:
                del self._codes[file]

    def code(self, file: str) -> CodeType:
        """For one copy alone: what Python learns of types and globals, to be faster, differs by copy."""
        self._compile(file)
        return marshal.loads(self._codes[file])  # type: ignore[no-any-return]

    def rebound(self, file: str) -> set[str]:
        """The names that functions of a module assign by `global`."""
        self._compile(file)
        return self._rebound[file]

    def _compile(self, file: str) -> None:
        if file not in self._codes:
            text = Path(file).read_text()
            edited = text if self.edit is None else self.edit(str(Path(file).relative_to(_ROOT)), text)
            code, self._rebound[file] = _kept(text, file) if edited == text else _compiled(edited, file)
            self._codes[file] = marshal.dumps(code)


source = _Source()


class _Resource:
    """A data file of the package, or a folder of data files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def joinpath(self, *names: str) -> _Resource:
        return _Resource(self._path.joinpath(*names))

    def read_bytes(self) -> bytes:
        return self.read_text().encode()

    def read_text(self, encoding: str = "utf-8") -> str:
        text = self._path.read_text(encoding)
        return text if source.edit is None else source.edit(str(self._path.relative_to(_ROOT)), text)


def _files(package: str) -> _Resource:
    return _Resource(_ROOT / PACKAGE / Path(*package.split(".")[1:]))


_resources = ModuleType("importlib.resources")
_resources.files = _files  # type: ignore[attr-defined]


class _Loader:
    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__.partition(".")[0]
        module.__dict__["__builtins__"] = {
            **vars(builtins),
            "__import__": _importer(own),
            "__point__": point,
        }
        exec(source.code(self._spec.origin), module.__dict__)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        own, _, rest = name.partition(".")
        if not own.startswith(_PREFIX):
            return None
        spec = importlib.util.find_spec(f"{PACKAGE}.{rest}" if rest else PACKAGE)
        if spec is None or spec.origin is None:
            return None
        found = importlib.machinery.ModuleSpec(
            name, _Loader(spec), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )
        found.has_location = True
        return found


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def _importer(own: str) -> Callable[..., ModuleType]:
    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        if name == PACKAGE or name.startswith(PACKAGE + "."):
            module = importlib.import_module(own + name[len(PACKAGE) :])
            for part in fromlist or ():
                if not hasattr(module, part):
                    importlib.import_module(f"{module.__name__}.{part}")
            return module if fromlist else sys.modules[own]
        if name == "importlib.resources":
            return _resources
        if level == 0 and name in fakes.MODULES:
            return fakes.MODULES[name]
        return builtins.__import__(name, globals, locals, fromlist, level)

    return import_


class Package:
    """A copy of the package."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Objects made once for all users of the copy: apps, for example.
        self.kept: dict[str, Any] = {}
        fixups = set(Celery.builtin_fixups)
        with _receivers_of(self):
            for needed in inside.NEEDED:
                importlib.import_module(f"{name}.{needed}".rstrip("."))
        inside.is_loaded(self, _place, _state_and_start, _is_child, uninterrupted)
        Celery.builtin_fixups.clear()
        Celery.builtin_fixups.update(fixups)
        self._modules = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}
        self._caches = [
            part
            for module in self._modules.values()
            for part in vars(module).values()
            if hasattr(part, "cache_clear") and getattr(part, "__module__", "") == module.__name__
        ]
        self._globals = [
            (vars(module), {name: vars(module)[name] for name in names if name in vars(module)})
            for module in self._modules.values()
            if (names := source.rebound(str(module.__file__)))
        ]
        self._contents = [*self._containers()]
        self._starts_anew = list(inside.all_that_start_anew(self))

    def __call__(self, name: str) -> Any:
        """A module of the copy."""
        return inside.module(self, name)

    def begin(self) -> None:
        """Reset it to the state of a new process."""
        with uninterrupted():
            self._begin()

    def _begin(self) -> None:
        for names, values in self._globals:
            names.update(values)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(content)
            else:
                container.update(content)
        for cache in self._caches:
            cache.cache_clear()
        inside.begin_anew(self)
        everything = inside.all_that_start_anew(self)
        everything.clear()
        everything.update(self._starts_anew)
        for it in self._starts_anew:
            it.start_anew()

    def _containers(self) -> Iterator[tuple[Any, Any]]:
        seen: set[int] = set()
        kinds = (dict, list, deque, MutableSet, WeakKeyDictionary, WeakValueDictionary)
        for module in self._modules.values():
            for name, part in vars(module).items():
                if name.startswith("__") or name == "_all" or not hasattr(part, "clear") or id(part) in seen:
                    continue
                # Constants do not change.
                if name.isupper() or isinstance(part, WeakSet) or not isinstance(part, kinds):
                    continue
                seen.add(id(part))
                yield part, (list(part) if isinstance(part, (list, deque)) else part.copy())


def _place() -> str:
    """The host of the current process, as others of it know it."""
    run = active()
    task = None if run is None else run.current
    return "" if task is None else task.process.host.identity


def _state_and_start(pid: int) -> tuple[str | None, str | None]:
    """Of a process of this host; its number stands for the time at which it was started."""
    process = fakes.process_here(pid)
    return (None, None) if process is None else ("R", str(process.pid))


def _is_child() -> bool:
    """Whether the current process is one of a pool."""
    run = active()
    task = None if run is None else run.current
    return task is not None and task.process.is_child


@contextmanager
def _receivers_of(package: Package) -> Iterator[None]:
    """Call the receivers that a copy connects to Celery's signals only in its own process."""
    connect = Signal.connect

    def guarded(signal: Signal, *args: Any, **kwargs: Any) -> Any:
        if not args or not callable(args[0]):
            return lambda receiver: guarded(signal, receiver, **kwargs)
        receiver = args[0]

        def receive(*given: Any, **named: Any) -> Any:
            run = active()
            task = None if run is None or run.over else run.current
            if task is not None and task.process.package is package:
                return receiver(*given, **named)
            return None

        connect(signal, receive, **{**kwargs, "weak": False})
        return receiver

    Signal.connect = guarded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Signal.connect = connect  # type: ignore[method-assign]


_loaded: list[Package] = []
_free: list[Package] = []


def take() -> Package:
    """A copy that no living process has."""
    if not _free:
        with uninterrupted():
            package = Package(f"{_PREFIX}{len(_loaded)}")
        _loaded.append(package)
        _free.append(package)
    return _free.pop(0)


def ready(count: int) -> list[Package]:
    """Make this many copies ahead."""
    give_back_all()
    made = [take() for _ in range(count)]
    give_back_all()
    return made


def give_back_all() -> None:
    """Free all copies, between two simulations."""
    _set_points_left(0)
    _free[:] = _loaded
