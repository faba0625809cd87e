"""Engines and API processes for the tests of a cluster."""

from tests.server.apart import apart

__all__ = ["apart"]
