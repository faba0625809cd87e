"""Keys of links over TCP, and TLS with them.

A key file holds a private key and its self-signed certificate, in PEM. All engines and API processes that
belong together have the same file. Each end presents the certificate and accepts only certificates in its own
file, so a process without the key gets no further than the handshake, at either end. To change the key,
append the old certificate to the new file: both are accepted until it is removed.

Only TLS 1.3, without session tickets: nothing of a recorded connection is accepted again. Keys are made by
the `openssl` command, once; running processes need nothing but Python.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
from pathlib import Path

from holdfast.engine.options import OptionError

__all__ = ["KEY_DAYS", "KeysNotMade", "client_context", "server_context", "write_keys"]

KEY_DAYS = 3650
MAKE = (
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:P-256",
    "-nodes",
    "-sha256",
)


class KeysNotMade(RuntimeError):
    """A key file cannot be written; the message says why."""


def write_keys(path: Path) -> None:
    """Write a new key file that only this user may read; an existing file is not replaced."""
    if os.path.lexists(path):
        raise KeysNotMade(f"{path} exists; remove it, or choose another name")
    with tempfile.TemporaryDirectory(prefix="holdfast-keys-") as folder:
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        command = [*MAKE, "-days", str(KEY_DAYS), "-subj", "/CN=holdfast link"]
        try:
            made = subprocess.run(
                [*command, "-keyout", str(key), "-out", str(certificate)],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise KeysNotMade("the openssl command is not installed (Debian: apt install openssl)") from error
        if made.returncode:
            raise KeysNotMade(f"openssl failed: {' '.join(made.stderr.split())[-300:]}")
        content = key.read_bytes() + certificate.read_bytes()
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeysNotMade(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise KeysNotMade(f"{path} cannot be written: {error.strerror}") from error


def server_context(path: str) -> ssl.SSLContext:
    """TLS of an engine."""
    context = _context(path, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return context


def client_context(path: str) -> ssl.SSLContext:
    """TLS of an API process."""
    return _context(path, ssl.PROTOCOL_TLS_CLIENT)


def _context(path: str, side: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # The certificate names a group of processes, not a host.
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(path, password=b"")  # Without one, OpenSSL asks at the terminal.
        context.load_verify_locations(path)
    except OSError as error:
        made = "make one with `holdfast link-keys FILE`"
        if isinstance(error, ssl.SSLError):
            raise OptionError("link_keys", f"names {path}, which is not a key file; {made}") from error
        raise OptionError(
            "link_keys", f"names {path}, which cannot be read: {type(error).__name__}; {made}"
        ) from error
    return context
