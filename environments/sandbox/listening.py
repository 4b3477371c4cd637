"""How a sandbox's listening socket comes out of it: by a pair of sockets that exists only while the sandbox begins.

The socket belongs to the sandbox's network namespace, whoever holds it; nothing of this machine's network is in there.
The pair is closed on both sides before any command runs (inside/door.py).
"""

from __future__ import annotations

import os
import socket
from types import TracebackType

from .inside.places import PROXY
from .wire import WireError

__all__ = ["Pair"]

SECONDS = 10.0


class Pair:
    """Use it as a context: both ends are closed when it is left. `inner`: the handle that a sandbox inherits."""

    def __init__(self) -> None:
        self.outer_socket, self.inner_socket = socket.socketpair()
        self.inner = self.inner_socket.fileno()

    def received(self) -> socket.socket:
        """The socket that the sandbox has handed out. Raises Broken for anything else."""
        self.outer_socket.settimeout(SECONDS)
        handles: list[int] = []
        try:
            message, handles, *_ = socket.recv_fds(self.outer_socket, 16, 4)
            if message == b"door" and len(handles) == 1:
                os.set_inheritable(handles[0], False)
                listener = socket.socket(fileno=handles[0])
                handles.clear()
                if is_listening(listener):
                    return listener
                listener.close()
        except OSError:
            pass
        finally:
            for handle in handles:
                os.close(handle)
        raise WireError("the sandbox's server hands out no socket")

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.outer_socket.close()
        self.inner_socket.close()


def is_listening(listener: socket.socket) -> bool:
    """Whether it is a socket that accepts connections where a door is expected."""
    is_stream = listener.family == socket.AF_INET and listener.type == socket.SOCK_STREAM
    return (
        is_stream
        and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and listener.getsockname() == PROXY
    )
