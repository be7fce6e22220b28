"""Silences the lock server for the workers of a rehearsal: a proxy in between holds back what both sides say.

If the locks are on several servers (Redlock), each server has a proxy, and all fall silent together.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_singleton_lock.backend import Backend, Kind, scheme

#: The port of a Redis whose URL does not name a port.
PORT = 6379

_LOOPBACK = "127.0.0.1"


class Detour:
    """The lock servers of an app behind proxies, which end with the `with` block.

    Args:
        urls: the URLs of the servers; without any, there is nothing in between.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        #: Cleared while the servers are silent.
        self._speaks = threading.Event()
        self._speaks.set()
        self._listeners: list[socket.socket] = []
        #: The value for `singleton_lock_backend`; None if there is nothing in between.
        self.backend = ";".join(map(self._routed, urls)) or None

    def __enter__(self) -> Detour:
        return self

    def __exit__(self, *_: object) -> None:
        self.speak()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def fall_silent(self) -> None:
        """Hold back all data, in both directions, until `speak`."""
        self._speaks.clear()

    def speak(self) -> None:
        self._speaks.set()

    def _routed(self, url: str) -> str:
        place, listener = urlsplit(url), socket.create_server((_LOOPBACK, 0))
        self._listeners.append(listener)
        _start(self._accept, listener, (place.hostname or "localhost", place.port or PORT))
        login, at, _ = place.netloc.rpartition("@")
        return urlunsplit(place._replace(netloc=f"{login}{at}{_LOOPBACK}:{listener.getsockname()[1]}"))

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with suppress(OSError):
            while True:
                _start(self._connect, listener.accept()[0], target)

    def _connect(self, client: socket.socket, target: tuple[str, int]) -> None:
        with client, suppress(OSError), socket.create_connection(target) as server:
            forth = _start(self._forward, client, server)
            self._forward(server, client)
            forth.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._speaks.wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def can_be_rerouted(backend: Backend, is_encrypted: bool) -> bool:
    """Whether a proxy can be in between: Sentinels and clusters name their servers themselves, and TLS checks names."""
    plain = all(scheme(url) == "redis" for url in backend.urls)
    return backend.kind in (Kind.SERVER, Kind.REDLOCK) and plain and not is_encrypted


def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="rehearsal-proxy", daemon=True)
    thread.start()
    return thread
