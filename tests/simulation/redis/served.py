"""The model on a port, for code that needs a socket: a thread reads from all clients, like a real server."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session


class ServedModel:
    """A model that is served on a free port, in real time."""

    def __init__(self, version: str = "7.2.4") -> None:
        self.model = RedisModel(time.time, version=version)
        self.broken: BaseException | None = None
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ended, self._ends = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._ended):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def url_of(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def __enter__(self) -> ServedModel:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ends.send(b"end")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._ends.close()
        self._selector.close()
        if self.broken is not None:
            raise self.broken

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - raised where the test ends
            self.broken = error
            self.model.disconnect_all()

    def _turn(self) -> bool:
        """Run one turn of the loop; returns whether to run another."""
        timer = self.model.next_timer()
        ready = self._selector.select(None if timer is None else max(timer - time.time(), 0) + 0.001)
        with self.model.turn():
            for key, _ in ready:
                if key.fileobj is self._ended:
                    return False
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        self.model.run_timers()
        return True

    def _accept(self) -> None:
        client, (host, port) = self._listening.accept()

        def closed() -> None:
            self._selector.unregister(client)
            client.close()

        def send(data: bytes) -> None:
            with suppress(OSError):  # The client is gone; the next turn notices that.
                client.sendall(data)

        session = self.model.connect(send, address=f"{host}:{port}", closed=closed)
        self._selector.register(client, selectors.EVENT_READ, session)

    def _read(self, client: socket.socket, session: Session) -> None:
        if session.id not in self.model.sessions:
            return  # Another client has just closed it.
        try:
            received = client.recv(65_536)
        except ConnectionError:
            received = b""
        if received:
            session.receive(received)
        else:
            session.close()
            session.closed()
