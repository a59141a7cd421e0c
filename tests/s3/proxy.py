"""A TCP proxy on 127.0.0.1 that breaks connections, for faults between a client and SeaweedFS.

with CuttingProxy(server.port) as proxy:
    proxy.cut_after(1 << 20, "down")     # the next connection to carry so much is cut there
    proxy.cut_after(1 << 20, "up")
    proxy.lose_reply("PUT /ckpt/key")    # passes the request on, and hangs up on its answer
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

Direction = Literal["up", "down"]
_PIECE = 1 << 16


class CuttingProxy:
    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._cut: dict[Direction, int] = {}
        self._lost: list[bytes] = []
        self.cuts = 0

    def cut_after(self, nbytes: int, direction: Direction) -> None:
        with self._lock:
            self._cut[direction] = nbytes

    def lose_reply(self, start: str) -> None:
        with self._lock:
            self._lost.append(start.encode())

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttingProxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone doesn't wake the thread in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            link = _Link(self, near, far)
            threading.Thread(target=link.pump, args=("up",), daemon=True).start()
            threading.Thread(target=link.pump, args=("down",), daemon=True).start()

    def meets(self, piece: bytes) -> bool:
        """Does this piece begin the request whose reply is to be lost?"""
        with self._lock:
            for start in self._lost:
                if piece.startswith(start):
                    self._lost.remove(start)
                    return True
        return False

    def room(self, direction: Direction, carried: int, size: int) -> int:
        """How much of the next `size` bytes may pass on a connection that carried so many."""
        with self._lock:
            limit = self._cut.get(direction)
            if limit is None or carried + size <= limit:
                return size
            del self._cut[direction]
            self.cuts += 1
            return max(0, limit - carried)


class _Link:
    """One connection on both sides."""

    def __init__(self, proxy: CuttingProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = {"up": (near, far), "down": (far, near)}
        self._losing = False

    def pump(self, direction: Direction) -> None:
        source, sink = self._sockets[direction]
        carried = 0
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if direction == "up" and self._proxy.meets(piece):
                    self._losing = True
                if direction == "down" and self._losing and b" 100 Continue" not in piece[:32]:
                    with self._proxy._lock:
                        self._proxy.cuts += 1
                    break
                room = self._proxy.room(direction, carried, len(piece))
                sink.sendall(piece[:room])
                carried += room
                if room < len(piece):
                    break
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
