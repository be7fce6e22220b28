"""Cuts only the workers of a rehearsal off from the lock server: a proxy in between falls silent or goes away.

If the locks are on several servers (Redlock), each server has a proxy, and all proxies do the same.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from celery_singleton_lock.backend import Backend, Kind, scheme

#: The port of a Redis whose URL does not name a port.
PORT = 6379

_LOOPBACK = "127.0.0.1"


class Proxy:
    """Forwards connections to a lock server, unless it has gone away or is silent."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._speaks = threading.Event()
        self._speaks.set()
        self._mutex = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.come_back()

    def fall_silent(self) -> None:
        """Hold back all data, in both directions, until `speak`."""
        self._speaks.clear()

    def speak(self) -> None:
        self._speaks.set()

    def go_away(self) -> None:
        """Cut all connections, and refuse new ones."""
        with self._mutex:
            ended = [*self._open, *((self._listener,) if self._listener else ())]
            self._listener = None
        for each in ended:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._speaks.set()

    def come_back(self) -> None:
        """Accept connections again, at the same address, if it was away."""
        if self._listener is not None:
            return
        listener = socket.create_server((_LOOPBACK, self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        _start(self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                _start(self._connect, listener, client)

    def _connect(self, listener: socket.socket, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._mutex:
            if self._listener is listener:
                self._open |= {client, server}
        if client not in self._open:  # The proxy has gone away meanwhile.
            client.close()
            server.close()
            return
        _start(self._forward, client, server)
        self._forward(server, client)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._speaks.wait()
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Detour:
    """The lock servers of an app behind proxies, which end with the `with` block.

    Args:
        urls: the URLs of the servers; without any, there is nothing in between.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        places = [urlsplit(url) for url in urls]
        self._proxies = [Proxy(place.hostname or "localhost", place.port or PORT) for place in places]
        routed = []
        for place, proxy in zip(places, self._proxies, strict=True):
            login, at, _ = place.netloc.rpartition("@")
            routed.append(urlunsplit(place._replace(netloc=f"{login}{at}{_LOOPBACK}:{proxy.port}")))
        #: The value for `singleton_lock_backend`; None if there is nothing in between.
        self.backend = ";".join(routed) or None

    def __enter__(self) -> Detour:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()

    def fall_silent(self) -> None:
        _each(self._proxies, Proxy.fall_silent)

    def speak(self) -> None:
        _each(self._proxies, Proxy.speak)

    def go_away(self) -> None:
        _each(self._proxies, Proxy.go_away)

    def come_back(self) -> None:
        _each(self._proxies, Proxy.come_back)


def can_be_rerouted(backend: Backend, is_encrypted: bool) -> bool:
    """Whether a proxy can be in between: Sentinels and clusters name their servers themselves, and TLS checks names."""
    plain = all(scheme(url) == "redis" for url in backend.urls)
    return backend.kind in (Kind.SERVER, Kind.REDLOCK) and plain and not is_encrypted


def _each(proxies: Sequence[Proxy], action: Callable[[Proxy], None]) -> None:
    for proxy in proxies:
        action(proxy)


def _start(target: Callable[..., None], *args: socket.socket) -> None:
    threading.Thread(target=target, args=args, name="rehearsal-proxy", daemon=True).start()
