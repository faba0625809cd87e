"""The Python client: sessions and turns of a remote server as plain objects.

Owns the client's side of the wire and nothing of the server's: it imports no other package of Holdfast, so it
works where neither torch nor a model is installed. Called by the command and by users.
"""

from holdfast.client.asynchronous import AsyncClient, AsyncSession
from holdfast.client.errors import (
    AnswerChanged,
    BadArgument,
    BadRequest,
    Conflict,
    ConnectionFailed,
    Expired,
    Forbidden,
    HoldfastError,
    NotFound,
    ProtocolError,
    RequestFailed,
    ServerFault,
    TooManyRequests,
    TurnFailed,
    Unauthorized,
    Unavailable,
)
from holdfast.client.realtime import AsyncRealtime, Realtime, RealtimeEvent
from holdfast.client.retry import Retries
from holdfast.client.sync import Client, Session
from holdfast.client.turn import AsyncTurn, Turn
from holdfast.client.values import (
    Generated,
    Sampling,
    SessionView,
    Timing,
    ToolCall,
    TurnEvent,
    TurnEventKind,
    TurnResult,
    Usage,
)

__all__ = [
    "AnswerChanged",
    "AsyncClient",
    "AsyncRealtime",
    "AsyncSession",
    "AsyncTurn",
    "BadArgument",
    "BadRequest",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Expired",
    "Forbidden",
    "Generated",
    "HoldfastError",
    "NotFound",
    "ProtocolError",
    "Realtime",
    "RealtimeEvent",
    "RequestFailed",
    "Retries",
    "Sampling",
    "ServerFault",
    "Session",
    "SessionView",
    "Timing",
    "TooManyRequests",
    "ToolCall",
    "Turn",
    "TurnEvent",
    "TurnEventKind",
    "TurnFailed",
    "TurnResult",
    "Unauthorized",
    "Unavailable",
    "Usage",
]
