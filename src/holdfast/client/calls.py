"""The calls of the interface as values: method, path and body, and how the answer is read.

Names and fields are those of the server's documentation. Each call with side effects carries an id that the
client chose, as its idempotency key. Both clients send these calls; building one does no I/O. Arguments that
JSON cannot carry are rejected here, all others by the server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx

from holdfast.client.errors import BadArgument, ProtocolError
from holdfast.client.values import (
    AnswerOptions,
    Body,
    Generated,
    Keep,
    Message,
    Prompt,
    Said,
    Sampling,
    SessionChange,
    SessionSettings,
    SessionView,
    Tool,
    ToolOutput,
    TurnFields,
    TurnOptions,
)

__all__ = [
    "DEFAULT_URL",
    "Call",
    "base_url",
    "change_session",
    "close_session",
    "cluster",
    "compact_session",
    "fork_session",
    "generate",
    "input_of",
    "interrupt_session",
    "keep_fields",
    "list_sessions",
    "memory",
    "metrics",
    "models",
    "new_id",
    "open_session",
    "restore_session",
    "rewind_session",
    "sampling_fields",
    "show_session",
    "spill_session",
    "start_turn",
    "tool_messages",
    "turn_fields",
    "written",
]


DEFAULT_URL = "http://127.0.0.1:8000"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request; `body` is sent as JSON, and `read` makes a value of the bytes that answer it.

    `carried_out` are the codes of refusals that, after an attempt whose answer was lost, say that it had been
    carried out: the answer then reads as empty.
    """

    method: str
    path: str
    body: Body | None
    read: Callable[[bytes], Answer]
    carried_out: tuple[str, ...] = ()


def new_id(kind: str) -> str:
    """A random id: `s` for sessions, `t` for turns, `r` for requests."""
    return f"{kind}-{secrets.token_hex(8)}"


def base_url(url: str) -> str:
    """The server's URL without a final slash or OpenAI's `/v1`."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise BadArgument(f"the address of a server begins with http:// or https://, not {url!r}")
    try:
        parts = urlsplit(url)
        reachable = bool(parts.hostname) and parts.port != 0
        httpx.URL(url).raw_host.decode().encode("idna")
    except (ValueError, httpx.InvalidURL):
        reachable = False
    if not reachable:
        raise BadArgument(f"the address of a server is such as {DEFAULT_URL}, not {url!r}")
    return url


def models() -> Call[list[Body]]:
    """The models, each as the server describes it."""
    return Call("GET", "/v1/models", None, lambda answer: _listed(answer, "data"))


def memory() -> Call[Body]:
    return Call("GET", "/v1/memory", None, _object)


def cluster(method: str, what: str = "", body: Body | None = None) -> Call[Body]:
    """A call about the engines behind a server: `drain`, `move`, `rebalance`, `events`, or their state."""
    return Call(method, f"/v1/cluster/{what}".rstrip("/"), body, _object)


def metrics() -> Call[dict[str, float]]:
    """The figures of the server, each by its name with its labels as the page writes them."""
    return Call("GET", "/metrics", None, _figures)


def list_sessions(after: str | None = None) -> Call[tuple[list[SessionView], str | None]]:
    """A page of a key's sessions, after the end of the previous page; returns the next position too."""
    path = "/v1/sessions" if after is None else f"/v1/sessions?after={quote(after, safe='')}"
    return Call("GET", path, None, _page)


def show_session(session_id: str) -> Call[SessionView]:
    return Call("GET", _session(session_id), None, _view)


def open_session(
    session_id: str | None,
    system: str | None,
    ttl: float | None,
    metadata: Mapping[str, str] | None,
    tools: Sequence[Tool] | None = None,
    settings: SessionSettings | None = None,
) -> Call[str]:
    """Open a session under an id of the client's own, so that asking twice opens one; read as that id."""
    name = session_id or new_id("s")
    offered = None if tools is None else [dict(tool) for tool in tools]
    about = {"id": name, "ttl": ttl, "metadata": metadata, "system": system, "tools": offered}
    body = _stated({**about, **(settings or {})})
    return Call("POST", "/v1/sessions", body, lambda answer: _acknowledged(answer, name), ("session_exists",))


def change_session(session_id: str, change: SessionChange) -> Call[SessionView]:
    """Change settings of a session; omitted ones stay."""
    return Call("PATCH", _session(session_id), dict(change), _view)


def close_session(session_id: str) -> Call[None]:
    return Call("DELETE", _session(session_id), None, _done)


def append_input(session_id: str, start: int, text: str) -> Call[int]:
    """Text of the next turn from a character on; answers how many characters there are now."""
    body = {"text": text, "start": start}
    return Call(
        "POST", _session(session_id, "input"), body, lambda answer: int(_object(answer)["characters"])
    )


def steer_fields(keep: Keep, heard: int | None) -> Body:
    """The fields of a steering turn, for the part that it keeps of the previous turn."""
    kept = keep_fields(keep, heard)
    if kept.get("keep") == "none":
        raise BadArgument("a turn that is steered keeps its input: keep a number of tokens, heard, or all")
    kept.pop("keep", None)
    return {"mode": "steer", **kept}


def start_turn(
    session_id: str, said: Said | None, fields: TurnFields, turn_id: str | None, steers: Body | None = None
) -> Call[None]:
    """A turn whose answer is a stream; its id is the client's, as its idempotency key.

    Without an input it uses the appended text; `steers` comes from `steer_fields`.
    """
    options, sampling = turn_fields(fields)
    body = {
        "turn_id": turn_id or new_id("t"),
        **({} if said is None else {"input": input_of(said)}),
        "sampling": sampling,
        "stream": True,
        **options,
        **(steers or {}),
    }
    return Call("POST", _session(session_id, "turns"), body, _done)


def interrupt_session(session_id: str, turn_id: str | None, keep: Body) -> Call[None]:
    """Interrupt a turn; `keep` comes from `keep_fields`."""
    body = _stated({"turn_id": turn_id, **keep})
    return Call("POST", _session(session_id, "interrupt"), body, _done, ("turn_not_found",))


def rewind_session(session_id: str, turns: int) -> Call[SessionView]:
    body = {"to_turn": turns, "request_id": new_id("r")}
    return Call("POST", _session(session_id, "rewind"), body, _view)


def compact_session(
    session_id: str, from_turn: int, to_turn: int, said: str | Sequence[Mapping[str, object]]
) -> Call[int]:
    """Replace turns by a text or messages; read as the number of tokens that are computed again."""
    given: Body = {"text": said} if isinstance(said, str) else {"messages": list(said)}
    body = {"from_turn": from_turn, "to_turn": to_turn, "request_id": new_id("r"), **given}
    return Call("POST", _session(session_id, "compact"), body, _recomputed)


def fork_session(session_id: str, child_id: str | None, at_turn: int | None) -> Call[str]:
    """A second session, under an id of the client's own; read as that id."""
    name = child_id or new_id("s")
    body = _stated({"id": name, "at_turn": at_turn, "request_id": new_id("r")})
    return Call(
        "POST",
        _session(session_id, "fork"),
        body,
        lambda answer: _acknowledged(answer, name),
        ("session_exists",),
    )


def spill_session(session_id: str, tier: str | None) -> Call[SessionView | None]:
    """Move a session off the device; read as None if that was done and its answer lost."""
    body = _stated({"tier": tier})
    return Call("POST", _session(session_id, "spill"), body, _view_if_any, ("cannot_spill",))


def restore_session(session_id: str) -> Call[SessionView | None]:
    """Bring a session back to the device; read as None if that was done and its answer lost."""
    return Call("POST", _session(session_id, "restore"), {}, _view_if_any, ("cannot_restore",))


def generate(model: str, prompt: Prompt, sampling: Sampling) -> Call[Generated]:
    prompts = prompt if isinstance(prompt, str) else list(prompt)
    body = {"model": model, "prompt": prompts, **sampling_fields(sampling)}
    return Call("POST", "/v1/completions", body, lambda answer: Generated.from_body(_object(answer)))


def written(body: Body) -> str:
    """A body as JSON; raises `BadArgument` for values that JSON cannot hold."""
    return _json(body, separators=(",", ":"))


def _json(value: object, separators: tuple[str, str] = (", ", ": ")) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"this cannot be sent as JSON: {error}") from error
    return text


def input_of(said: Said) -> str | list[int] | list[Message]:
    """The input of a turn as JSON carries it; a list holds token ids or messages, never both."""
    if isinstance(said, str):
        return said
    if isinstance(said, Sequence):
        tokens = [part for part in said if isinstance(part, int) and not isinstance(part, bool)]
        messages: list[Message] = [dict(part) for part in said if isinstance(part, Mapping)]
        if len(tokens) == len(said):
            return tokens
        if len(messages) == len(said):
            return messages
    raise BadArgument(
        "say text, a list of token ids, or a list of messages such as {'role': …, 'content': …}"
    )


def tool_messages(results: Mapping[str, ToolOutput]) -> list[Message]:
    """The results of tool calls as messages; those that are not text as JSON."""
    if not results:
        raise BadArgument("give the result of at least one tool call, by its id")
    return [
        {
            "role": "tool",
            "tool_call_id": call_id,
            "content": result if isinstance(result, str) else _json(result),
        }
        for call_id, result in results.items()
    ]


def turn_fields(given: TurnFields) -> tuple[Body, Body]:
    """Options and sampling as JSON carries them; the server refuses unknown ones among the latter."""
    names = TurnOptions.__annotations__.keys() | AnswerOptions.__annotations__.keys()
    options = {name: value for name, value in given.items() if name in names and value is not None}
    sampling = cast(Sampling, {name: value for name, value in given.items() if name not in names})
    return options, sampling_fields(sampling)


def sampling_fields(sampling: Sampling) -> Body:
    """Sampling as JSON carries it."""
    fields: Body = dict(sampling)
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    return fields


def keep_fields(keep: Keep, heard: int | None) -> Body:
    """The fields for the kept part of an interrupt; `heard` is the number of tokens handed to the caller."""
    if keep == "heard":
        return {"keep": "all"} if heard is None else {"keep_tokens": heard}
    if isinstance(keep, str):
        return {"keep": keep}
    return {"keep_tokens": keep}


def _session(session_id: str, verb: str = "") -> str:
    path = f"/v1/sessions/{quote(session_id, safe='', errors='replace')}"
    return f"{path}/{verb}" if verb else path


def _stated(fields: Mapping[str, object]) -> Body:
    """The fields that are not None: the server has its own defaults."""
    return {name: value for name, value in fields.items() if value is not None}


def _acknowledged(answer: bytes, value: Answer) -> Answer:
    """A value known before; an answer is only checked for being a Holdfast server's."""
    if answer:
        _object(answer)
    return value


def _done(answer: bytes) -> None:
    """An answer without a value."""
    return _acknowledged(answer, None)


def _object(answer: bytes) -> Body:
    """An answer that is a JSON object."""
    try:
        body = json.loads(answer)
    except ValueError as error:
        raise ProtocolError("the answer is not JSON; is this the URL of a Holdfast server?") from error
    if not isinstance(body, dict):
        raise ProtocolError("the answer is not a JSON object; is this the URL of a Holdfast server?")
    return body


def _listed(answer: bytes, name: str) -> list[Body]:
    """The objects that an answer lists under a name."""
    listed = _object(answer).get(name)
    if not isinstance(listed, list) or not all(isinstance(body, dict) for body in listed):
        raise ProtocolError(f"the answer has no list of {name}; is this the URL of a Holdfast server?")
    return listed


def _page(answer: bytes) -> tuple[list[SessionView], str | None]:
    """Sessions, and where the next page begins; a server that says nothing of it has listed all."""
    more = _object(answer).get("next")
    if more is not None and not isinstance(more, str):
        raise ProtocolError("the answer does not say where the next page begins")
    return [SessionView.from_body(body) for body in _listed(answer, "sessions")], more


def _recomputed(answer: bytes) -> int:
    count = _object(answer).get("recomputed_tokens")
    if not isinstance(count, int):
        raise ProtocolError("the answer has no number of recomputed tokens")
    return count


def _view(answer: bytes) -> SessionView:
    return SessionView.from_body(_object(answer))


def _view_if_any(answer: bytes) -> SessionView | None:
    return _view(answer) if answer else None


def _figures(page: bytes) -> dict[str, float]:
    """The samples of a Prometheus page."""
    lines = (line for line in page.decode().splitlines() if line and not line.startswith("#"))
    try:
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    except ValueError as error:
        raise ProtocolError("cannot read the metrics page") from error
