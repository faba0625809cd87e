"""What an attack may be answered with, and the bounds that the server keeps meanwhile.

All numbers and lists of allowed answers that the attacks share stand here. The deadlines are far from what a
healthy server needs, on a machine that is busy with other things too: they catch a standstill alone.
"""

STANDSTILL_SECONDS = 10.0
"""A neighbour that gets none of its next tokens for this long stands still."""

TOKENS_MEANWHILE = 20
"""Tokens that every neighbour gets, again and again, as long as an attack goes on."""

START_SECONDS = 900.0
"""A server that is not up after this long never will be. Several processes start, each with its imports."""

ANSWER_SECONDS = 120.0
"""A request that has no answer after this long never gets one."""

HALF_OPEN_SECONDS = 120.0
"""A connection that sends no whole request for this long must have been closed by the server."""

MEBIBYTE = 1 << 20
GROWTH_BYTES = 160 * MEBIBYTE
"""What all processes of a server may grow by in an attack, together."""

BODIES_GROWTH_BYTES = 400 * MEBIBYTE
"""The same, where it receives bodies of 600 MB that nobody finishes."""

DESCRIPTORS_SLACK = 8
"""How many descriptors more than before may be open after an attack: pools of connections that are kept."""

HOST_REFUSED = (400, 403, 421)
"""A Host header that names somebody else, or an Origin that may not call."""

FLOOD_CLOSED = (1002, 1008, 1009)
"""Close codes for a client that sends frames without measure."""

FLOOD_BYTES = 24 * MEBIBYTE
"""How much a flood of tiny frames sends at most: by then the connection must have been closed."""

ENDS_WITH = (1, 2)
"""Exit statuses of a server that cannot start with what it was given."""


def refused(status: int) -> bool:
    """Whether an answer says that the client is wrong, or has to wait."""
    return 400 <= status < 500


def refused_or_busy(status: int) -> bool:
    """As `refused`; or the server says that it has no room for the request now."""
    return refused(status) or status == 503
