"""Clients of servers on this machine need no certificates; reading those takes 30 milliseconds a client."""

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody: for `httpx.Client(verify=NO_TLS)`, over plain HTTP."""
