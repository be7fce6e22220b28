"""A TCP proxy that can lose replies: the command arrives and is carried out, but its reply never comes.

It does whatever else a network does, too: it holds back one direction or both, is slow, cuts and forgets connections.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

from celery_singleton_lock import clock
from celery_singleton_lock.stores.redis import ledger, lock_commands
from celery_singleton_lock.stores.redis.script import Script

#: Seconds that a client gets for the TLS handshake: meanwhile no other client is accepted.
HANDSHAKE = 10.0


#: Kinds of commands, by their text.
KINDS: dict[str, bytes] = {
    **{
        name: script.sha.encode()
        for module in (lock_commands, ledger)
        for name, script in vars(module).items()
        if isinstance(script, Script)
    },
    "BLPOP": b"BLPOP",
}


class LossyProxy:
    """Forwards to a port; `lose(n)` swallows the next n replies and cuts their connections. Speaks TLS if asked to.

    `delay(seconds)` holds every reply back for that long.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._to_lose = 0
        self._delay = 0.0
        self.lost = 0
        #: Set while a direction is let through: commands, replies.
        self._open = {False: threading.Event(), True: threading.Event()}
        self.let_through()
        self._forsaken: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]
        self._go(self._accept)

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_through()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(2 * HANDSHAKE)  # Connections that it has accepted are to be closed as well.
        for one in [*self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def lose(self, replies: int) -> None:
        self._to_lose = replies

    def delay(self, seconds: float) -> None:
        self._delay = seconds

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for one in self._sockets[1:]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def hold(self, *, commands: bool = False, replies: bool = False) -> None:
        """Hold back these directions, and deliver at `let_through`: as TCP does in a partition."""
        for way, held in ((False, commands), (True, replies)):
            if held:
                self._open[way].clear()

    def let_through(self) -> None:
        for way in self._open.values():
            way.set()

    def forsake(self) -> None:
        """Forget the present connections without closing them: half open, they take everything and answer nothing."""
        self._forsaken = {*self._sockets[1:]}

    def _go(self, target: object, *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                client = self._secured(client)
            except OSError:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()  # It is dead now, and may come back.
                continue
            self._sockets += [client, server]
            self._go(self._connect, client, server)

    def _secured(self, client: socket.socket) -> socket.socket:
        if self._tls is None:
            return client
        client.settimeout(HANDSHAKE)
        client = self._tls.wrap_socket(client, server_side=True)
        client.settimeout(None)
        return client

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        back = self._go(self._forward, server, client, True)
        self._forward(client, server, False)
        back.join()
        for one in (client, server):
            self._sockets.remove(one)
            one.close()

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if is_reply and self._to_lose > 0:
                    self._to_lose -= 1
                    self.lost += 1
                    break
                if is_reply and self._delay:
                    clock.sleep(self._delay)
                self._open[is_reply].wait()
                if source not in self._forsaken:
                    sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
