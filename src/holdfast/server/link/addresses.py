"""Addresses of engines as they are written: `HOST:PORT`, with an IPv6 address in brackets."""

from __future__ import annotations

import re

from holdfast.engine.options import OptionError

__all__ = ["split_address"]

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]{1,253})):(\d{1,5})")


def split_address(option: str, address: str) -> tuple[str, int]:
    """Host and port of an address; raises an `OptionError` about `option`."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 <= int(found[3]) <= 65535:
        raise OptionError(option, f"must be HOST:PORT, such as 10.0.0.2:7000 or [::1]:7000, not {address!r}")
    return found[1] or found[2], int(found[3])
