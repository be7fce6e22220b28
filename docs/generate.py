"""Writes the pages of docs/reference that are made from the code: `python -m docs.generate`.

They are kept in the repository, so that they can be read there; `tests/unit/test_docs.py` fails when one of them is not
what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from celery import Celery
from sphinx.pycode import ModuleAnalyzer

from celery_singleton_lock import cli, errors, signals
from celery_singleton_lock.backend import MAX_NODES, MIN_NODES, SCHEMES
from celery_singleton_lock.options import rules
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.options.task import KEY_ATTRIBUTES
from celery_singleton_lock.task import singleton_task

HERE = Path(__file__).parent / "reference"

MADE = "<!-- Made from the code by `python -m docs.generate`; do not edit. -->\n"

#: Defaults that are no value.
IN_WORDS = {
    "singleton_lock_backend": "the broker, if that is one Redis server; else the result backend, if that is; "
    "`memory://` with a `memory://` broker",
    "singleton_lock_done_ttl": "the broker's `visibility_timeout`, and `3600` at least",
    "singleton_lock_beat_name": "the app's name",
    "singleton_lock_transport_options": "`{}`; the broker's `master_name` and `sentinel_kwargs` with a broker's "
    "Sentinels",
    "singleton_lock_accept": "all but `disable`",
    "lock_name": "the task's name",
}

#: What the code says about these is for those who work on it.
MEANINGS = {"singleton_lock_backend": "URL of the server that keeps the locks."}

#: What the rules of these settings leave to a function.
ALLOWED = {
    "singleton_lock_backend": f"{', '.join(f'`{scheme}://`' for scheme in SCHEMES)}; "
    f"{MIN_NODES}, 5, 7 or {MAX_NODES} servers joined by `;` are a [Redlock](../locks.md#redlock)",
    "lock_key": "`None`; a list of names of arguments; a template; a callable of the dictionary of arguments",
}


def pages() -> Mapping[str, str]:
    """Each page's name and text."""
    makers: tuple[Callable[[], str], ...] = (every_option, every_signal, every_error, every_command)
    return {f"{maker.__name__.removeprefix('every_')}s.md": MADE + maker() for maker in makers}


def every_option() -> str:
    return "\n".join(
        [
            "# Options and settings\n",
            "All of them, with what is allowed. [Options](../options.md) says how they work together.\n",
            "## On a task, or for the whole app\n",
            *_task_options(),
            "## For the whole app\n",
            *_settings(rules.LOCK_SETTINGS, Settings),
            "## Of beat\n",
            "For [`celery beat -S exclusive`](../beat.md).\n",
            *_settings(rules.BEAT_SETTINGS, BeatSettings),
        ]
    )


def every_signal() -> str:
    analyzer = _analyzed("celery_singleton_lock.signals")
    told = "\n".join(
        f"## {name}\n\n{_comment(analyzer, '', name)}\n"
        for name in vars(signals)
        if not name.startswith("_") and ("", name) in analyzer.attr_docs
    )
    return f"# Signals\n\n{_prose(signals)}\n\n`from celery_singleton_lock import lock_acquired`, and so on.\n\n{told}"


def every_error() -> str:
    told = "\n".join(
        f"## {name}\n\n{_bases(error)}{_prose(error)}\n"
        for name, error in vars(errors).items()
        if isinstance(error, type) and error.__module__ == errors.__name__
    )
    return f"# Errors\n\n{_prose(errors)}\n\n{told}"


def every_command() -> str:
    app = Celery()
    of_worker = "\n".join(
        _parameter(option) for option in sorted(app.user_options["worker"], key=lambda o: str(o.name))
    )
    return (
        "# Commands\n\nBeside Celery's own options.\n\n"
        f"## celery worker\n\n{of_worker}\n\n"
        "## celery beat\n\n- `-S exclusive`: see [beat](../beat.md).\n\n"
        + "\n".join(_command("celery locks", cli.locks, level=2))
    )


def _task_options() -> Iterator[str]:
    analyzer = _analyzed(singleton_task.__name__)
    for name in KEY_ATTRIBUTES:
        told = [_comment(analyzer, "SingletonTask", name)]
        if name == "lock_key":
            told.append("- for one call: `key`, a text")
        yield _entry(
            name, [*told, f"- default: {IN_WORDS.get(name, '`None`')}", f"- allowed: {ALLOWED.get(name, 'a text')}"]
        )
    for name, option in rules.OPTIONS.items():
        told = [_comment(analyzer, "SingletonTask", option.attribute), f"- app setting: `{option.setting}`"]
        if name in rules.CALL_KEYS:
            told.append(f"- for one call: `{name}`")
        yield _entry(
            option.attribute,
            [*told, f"- default: {_value(option.default)}", f"- allowed: {_allowed(name, option.rule)}"],
        )


def _settings(rules: Mapping[str, Any], settings: type) -> Iterator[str]:
    meanings = dict(re.findall(r"^    (\w+): (.+?)(?=\n    \w|\Z)", _section(settings), re.MULTILINE | re.DOTALL))
    app = Celery(broker="redis://", set_as_current=False)
    defaults = settings.from_app(app)  # type: ignore[attr-defined]
    for setting, rule in rules.items():
        name = setting.removeprefix("singleton_lock_").removeprefix("beat_")
        default = IN_WORDS.get(setting) or _value(getattr(defaults, name))
        told = [
            MEANINGS.get(setting) or " ".join(meanings[name].split()),
            f"- default: {default}",
            f"- allowed: {_allowed(setting, rule)}",
        ]
        yield _entry(setting, told)


def _allowed(name: str, rule: Any) -> str:
    return ALLOWED.get(name) or re.sub(r"'([^']*)'", r'`"\1"`', rule.words)


def _entry(name: str, told: list[str]) -> str:
    first, *others = told
    sentence = f"{first[:1].upper()}{first[1:]}\n\n" if first else ""
    return f"### {name}\n\n{sentence}" + "\n".join(others) + "\n"


def _value(default: object) -> str:
    if isinstance(default, float):
        return f"`{default:g}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _command(name: str, command: click.Command, *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n\n{inspect.cleandoc(command.help or '')}\n"
    parameters = [_parameter(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if parameters:
        yield "\n".join(parameters) + "\n"
    if isinstance(command, click.Group):
        for child, of_child in sorted(command.commands.items()):
            yield from _command(f"{name} {child}", of_child, level=level + 1)


def _parameter(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        given = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.split()[0].upper()}"
        return f"- `{', '.join(parameter.opts)}{given}`: {parameter.help or ''}".rstrip()
    return f"- `{parameter.human_readable_name}`" + ("" if parameter.required else " (may be left out)")


def _bases(error: type) -> str:
    bases = [base.__name__ for base in error.__bases__ if base.__name__ != "Exception"]
    return f"Made of {', '.join(f'`{base}`' for base in bases)}. " if bases else ""


def _analyzed(module: str) -> ModuleAnalyzer:
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return analyzer


def _comment(analyzer: ModuleAnalyzer, scope: str, name: str) -> str:
    """What its `#:` comment says."""
    return " ".join(" ".join(analyzer.attr_docs.get((scope, name), [])).split())


def _section(of: type) -> str:
    return inspect.cleandoc(of.__doc__ or "").partition("Attributes:\n")[2]


def _prose(of: object) -> str:
    """A docstring as Markdown: its attributes become a list."""
    text, _, attributes = inspect.cleandoc(of.__doc__ or "").partition("Attributes:\n")
    listed = re.sub(r"^    (\w+): ", r"- `\1`: ", attributes, flags=re.MULTILINE)
    return re.sub(r"\n    +", "\n  ", f"{text.rstrip()}\n\n{listed}".rstrip())


if __name__ == "__main__":
    for page, text in pages().items():
        (HERE / page).write_text(text)
