"""Ports for servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody had a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
