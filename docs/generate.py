"""Writes what the code knows into the documentation: `python -m docs.generate`.

In docs/options.md, which is otherwise written by hand, it writes the tables and the list under each option's heading;
`tests/unit/test_docs.py` fails if the page is out of date. The site's page of commands is made as Sphinx reads it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from celery import Celery

from celery_singleton_lock import cli
from celery_singleton_lock.backend import MAX_NODES, MIN_NODES, SCHEMES
from celery_singleton_lock.options import rules
from celery_singleton_lock.options.app import BeatSettings, Settings
from celery_singleton_lock.options.rules import KEY_ATTRIBUTES

PAGE = Path(__file__).parent / "options.md"

#: Defaults that depend on something else, in words.
IN_WORDS = {
    "singleton_lock_backend": "the broker, if that is one Redis server; else the result backend, if that is; "
    "`memory://` with a `memory://` broker",
    "singleton_lock_done_ttl": "the broker's `visibility_timeout`, and `3600` at least",
    "singleton_lock_beat_name": "the app's name",
    "singleton_lock_prefix": '`"singleton_lock"`, after the `global_keyprefix` of the broker (if that is Redis) or of '
    "the result backend (if the locks are there)",
    "singleton_lock_transport_options": "`{}`; the broker's `master_name` and `sentinel_kwargs` with a broker's "
    "Sentinels",
    "singleton_lock_accept": "all but `disable`",
    "lock_name": "the task's name",
}

#: What is allowed, for options that a function checks.
ALLOWED = {
    "singleton_lock_backend": f"{', '.join(f'`{scheme}://`' for scheme in SCHEMES)}; "
    f"{MIN_NODES}, 5, 7 or {MAX_NODES} servers joined by `;` are a [Redlock](locks.md#redlock)",
    "lock_key": "`None`; a list of names of arguments, or of paths into them such as `order.id`; a template; a "
    "callable of the dictionary of arguments",
}


#: The items of the list under an option's heading, as a pattern.
FACTS = "setting|default|allowed"


class Facts(NamedTuple):
    """What the code knows about an option."""

    default: str
    allowed: str
    setting: str = ""
    of_call: str = ""

    def listed(self) -> str:
        setting = f"- setting: {self.setting}\n" if self.setting else ""
        return f"{setting}- default: {self.default}\n- allowed: {self.allowed}\n"


def with_facts(page: str) -> str:
    """Return the page of options with the tables and lists from the code.

    Raises:
        ValueError: an option has no heading, or one too many.
    """
    of_task = _task_options()
    of_app = {**_settings(Settings, rules.LOCK_SETTINGS), **_settings(BeatSettings, rules.BEAT_SETTINGS)}
    for name, facts in {**of_task, **of_app}.items():
        section = re.compile(rf"^(### {name}\n\n(?:(?!#).*\n)*?)(?:- (?:{FACTS}): .*\n)+", re.MULTILINE)
        page, found = section.subn(partial(_with_list, facts), page)
        if found != 1:
            raise ValueError(f"docs/options.md needs one heading, a text and a list for {name}: there are {found}")
    described = set(re.findall(r"^### ((?:singleton_)?lock_\w+|on_\w+)$", page, re.MULTILINE))
    if unknown := described - {*of_task, *of_app}:
        raise ValueError(f"docs/options.md describes options that do not exist: {', '.join(sorted(unknown))}")
    for name, rows in (("task", _rows_of_tasks(of_task)), ("app", _rows_of_apps(of_app))):
        block = re.compile(rf"(<!-- made from the code: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = block.sub(partial(_with_rows, rows), page)
    return page


def _with_list(facts: Facts, section: re.Match[str]) -> str:
    return section[1] + facts.listed()


def _with_rows(rows: Iterator[str], block: re.Match[str]) -> str:
    lines = "\n".join(rows)
    return f"{block[1]}\n{lines}\n\n{block[2]}"


def _rows_of_tasks(options: Mapping[str, Facts]) -> Iterator[str]:
    # With the names of settings, the table would be too wide.
    yield "| option | for one call | default |\n|---|---|---|"
    for name, facts in options.items():
        yield f"| [`{name}`](#{name}) | {facts.of_call} | {facts.default} |"


def _rows_of_apps(settings: Mapping[str, Facts]) -> Iterator[str]:
    yield "| setting | default |\n|---|---|"
    for name, facts in settings.items():
        default = "depends" if name in IN_WORDS else facts.default
        yield f"| [`{name}`](#{name}) | {default} |"


def every_command() -> str:
    app = Celery()
    of_worker = "\n".join(
        _parameter(option) for option in sorted(app.user_options["worker"], key=lambda o: str(o.name))
    )
    return (
        f"## celery worker\n\n{of_worker}\n\n"
        "## celery beat\n\n- `-S exclusive`: see [beat](../beat.md).\n\n"
        + "\n".join(_command("celery locks", cli.locks, level=2))
    )


def _task_options() -> Mapping[str, Facts]:
    of_key = {
        name: Facts(
            IN_WORDS.get(name, "`None`"), ALLOWED.get(name, "a text"), of_call="`key`, a text" * (name == "lock_key")
        )
        for name in KEY_ATTRIBUTES
    }
    return of_key | {
        option.attribute: Facts(
            _value(option.default),
            _allowed(name, option.rule),
            f"`{option.setting}`",
            f"`{name}`" * (name in rules.CALL_KEYS),
        )
        for name, option in rules.OPTIONS.items()
    }


def _settings(settings: type, names: Mapping[str, Any]) -> Mapping[str, Facts]:
    defaults = settings.from_app(Celery(broker="redis://", set_as_current=False))  # type: ignore[attr-defined]

    def default(setting: str) -> str:
        name = setting.removeprefix("singleton_lock_").removeprefix("beat_")
        return IN_WORDS.get(setting) or _value(getattr(defaults, name))

    return {setting: Facts(default(setting), _allowed(setting, rule)) for setting, rule in names.items()}


def _allowed(name: str, rule: Any) -> str:
    return ALLOWED.get(name) or re.sub(r"'([^']*)'", r'`"\1"`', rule.words)


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


if __name__ == "__main__":
    PAGE.write_text(with_facts(PAGE.read_text()))
