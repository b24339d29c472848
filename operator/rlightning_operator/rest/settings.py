"""What can be set of the status service; `main.py` reads it from the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of one running service."""

    namespaces: tuple[str, ...] = ()
    """The service's account may read these only (a namespaced install); empty: all."""
    audiences: tuple[str, ...] = ()
    """A token must be meant for one of these; empty: for the API server itself."""
    cache_seconds: float = 10.0
    """How long the API server's word about a token or a right is kept."""
    cache_size: int = 4096
    """How many such words are kept, of each kind."""
    api_seconds: float = 5.0
    """Deadline of one request to the API server."""
    request_seconds: float = 10.0
    """Deadline of one request to the service; a request makes up to five to the API server."""
    docs: bool = False
    """Serve /docs, a page which loads its scripts from the internet."""
