"""The socket at which a door out of the sandbox is found: opened here, in the sandbox's own network, and handed out to
whoever made the sandbox.

It happens before any command runs. What is handed out is the only handle of it, so no process inside can take what
comes there."""

from __future__ import annotations

import _socket  # the package socket loads enum, which slows down every start
import os
import sys

from .places import PROXY

__all__ = ["hand_out"]


def hand_out(handle: int) -> None:
    """Sends a listening socket through a pair of sockets, of which `handle` is one, and closes both. Raises OSError."""
    pair = _socket.socket(fileno=handle)
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(PROXY)
    listener.listen(64)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.fileno().to_bytes(4, sys.byteorder))
    pair.sendmsg([b"door"], [rights])
    os.close(listener.detach())
    os.close(pair.detach())
