"""Patches of Ray Serve's replica process, by the names in Ray 2.60.

A replica calls these functions after the deployment's constructor has run, so the constructor replaces them.
Nothing else of Ray's internals is patched; `tests/ray` fails if another version has other names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import ray

__all__ = ["bind_handles_to_machine", "serve_http_with"]

REPLICA = "ray.serve._private.replica"


def bind_handles_to_machine() -> None:
    """Bind the port for calls between deployments to the machine's address.

    Serve opens it on all interfaces, and it takes pickled arguments: whoever reaches it may run code.
    """
    replica: Any = import_module(REPLICA)
    original: Callable[[Any, str], int] = replica.add_port_to_grpc_server
    host = ray.util.get_node_ip_address()
    shown = f"[{host}]" if ":" in host else host

    def bound(server: Any, address: str) -> int:
        return original(server, f"{shown}:{address.rpartition(':')[2]}")

    replica.add_port_to_grpc_server = bound


def serve_http_with(start: Callable[..., Awaitable[tuple[Any, Any]]]) -> None:
    """Have a replica of the ingress call `start` for its HTTP server; Serve stops what it returns."""
    replica: Any = import_module(REPLICA)
    _ = replica.start_asgi_http_server  # Raises where Ray calls it otherwise.
    replica.start_asgi_http_server = start
