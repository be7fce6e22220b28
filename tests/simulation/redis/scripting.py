"""Scripts, run by a real Lua 5.1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lupa.lua51

from tests.simulation.redis.replies import NIL_LIST, CallError, CommandError, Status, shown

if TYPE_CHECKING:
    from tests.simulation.redis.server import RedisModel

#: Up to this many keys and arguments go to Lua one by one, which is faster than tables, but limited.
_FEW = 120


class _ScriptEnds(Exception):
    """A call got an error as its answer."""


class Lua:
    """An interpreter. Scripts keep no state in it: all servers of one version share it and its compiled scripts."""

    def __init__(self, *, is_seven: bool) -> None:
        self._is_seven = is_seven
        self._lua = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._null = self._lua.execute(b"return newproxy(false)")
        text = Path(__file__).with_name("prelude.lua").read_bytes()
        given = self._call, self._pcall, self._problem_of, sha_of, self._decode, self._null, is_seven
        self._compile, self._run, self._run_with, self._here, self._ok = self._lua.execute(text, *given)
        self._problem: bytes | None = None
        self._compiled: dict[bytes, Any] = {}
        self._server: RedisModel | None = None
        self._broken: BaseException | None = None

    def compiled(self, text: bytes) -> Any:
        """The compiled script.

        Raises:
            CommandError: it is not a valid script.
        """
        script = self._compiled.get(text)
        if script is None:
            script = self._compile(text)
            if isinstance(script, tuple):
                script, problem = script
                if script is None:
                    raise CommandError(
                        b"ERR Error compiling script (new function): "
                        + problem.replace(b"\r", b" ").replace(b"\n", b" ")
                    )
            self._compiled[text] = script
        return script

    def run(self, server: RedisModel, text: bytes, sha: bytes, keys: list[bytes], args: list[bytes]) -> bytes:
        """The answer of a script, as it goes over the wire."""
        script = self.compiled(text)
        self._server, self._broken = server, None
        if len(keys) + len(args) > _FEW:
            answer = self._run(script, sha, self._lua.table_from(keys), self._lua.table_from(args))
        else:
            answer = self._run_with(script, sha, len(keys), *keys, *args)
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        return answer  # type: ignore[no-any-return]

    def _call(self, *words: Any) -> Any:
        """`redis.call`: an error ends the script."""
        reply, self._problem = self._carried_out(words)
        if self._problem is not None:
            raise _ScriptEnds
        return reply

    def _pcall(self, *words: Any) -> Any:
        """`redis.pcall`: an error is an answer."""
        reply, problem = self._carried_out(words)
        return reply if problem is None else self._lua.table_from({b"err": problem})

    def _problem_of(self) -> Any:
        """The error that has ended the script."""
        return self._lua.table_from({b"err": self._problem}) if self._is_seven else self._problem

    def _carried_out(self, words: Sequence[Any]) -> tuple[Any, bytes | None]:
        """Carry out a command of a script; returns its answer as a Lua value, and its error."""
        try:
            if self._broken is not None:
                # The script goes on after `pcall`, but must not do anything more.
                return None, b"ERR the model is broken"
            if not words:
                raise CallError(
                    "ERR Please specify at least one argument for this redis lib call",
                    "Please specify at least one argument for redis.call()",
                )
            name, *args = [word if word.__class__ is bytes else _text(word) for word in words]
            reply = self._server.from_script(name, args)  # type: ignore[union-attr]
            kind = reply.__class__
            if kind is bytes or kind is int:
                return reply, None
            return False if reply is None else self._as_lua(reply), None
        except CallError as error:
            return None, error.text if self._is_seven else self._here() + error.before_seven
        except CommandError as error:
            return None, error.text
        except BaseException as broken:  # noqa: BLE001 - raised where Lua has ended
            self._broken = broken
            return None, b"ERR the model is broken"

    def _as_lua(self, reply: Any) -> Any:
        if reply is None or reply is NIL_LIST:
            return False
        if isinstance(reply, Status):
            return self._ok(bytes(reply))
        if isinstance(reply, list):
            return self._lua.table_from([self._as_lua(each) for each in reply])
        return reply

    def _decode(self, text: Any) -> Any:
        """The value of a JSON text; or None and the error."""
        if not isinstance(text, bytes):
            return None, b"bad argument #1 to 'decode' (string expected)"
        try:
            return self._of_json(json.loads(text.decode("latin-1")))
        except (ValueError, RecursionError) as error:
            return None, str(error).encode()

    def _of_json(self, value: Any) -> Any:
        if value is None:
            return self._null
        if isinstance(value, str):
            # Written as \u, it may be beyond latin-1.
            return value.encode("latin-1") if value.isascii() else _utf8_of(value)
        if isinstance(value, list):
            return self._lua.table_from([self._of_json(each) for each in value])
        if isinstance(value, dict):
            return self._lua.table_from({_utf8_of(name): self._of_json(each) for name, each in value.items()})
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@lru_cache(maxsize=2)
def lua_of(is_seven: bool) -> Lua:
    """The interpreter for servers before version 7, or since."""
    return Lua(is_seven=is_seven)


def _text(word: Any) -> bytes:
    """An argument of a command."""
    if word.__class__ in (int, float):
        return shown(word)
    raise CallError(
        "ERR Lua redis lib command arguments must be strings or integers",
        "Lua redis() command arguments must be strings or integers",
    )


def _utf8_of(text: str) -> bytes:
    """Bytes were read as latin-1; characters beyond, written as \\u, become UTF-8, as in cjson."""
    return b"".join(
        each.encode("latin-1") if ord(each) < 256 else each.encode("utf-8", "surrogatepass") for each in text
    )


@lru_cache(maxsize=4096)
def sha_of(text: bytes) -> bytes:
    """The digest by which a script is known."""
    return hashlib.sha1(text).hexdigest().encode()
