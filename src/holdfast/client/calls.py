"""The calls of the interface as values: method, path and body, each with the id that makes it repeatable.

Names and fields are those of the server's documentation. Building a call talks to nobody; both clients send
them. What a caller got wrong in a way that the server could not tell is refused here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from holdfast.client.errors import ProtocolError
from holdfast.client.values import Body, Keep, Message, Said, Sampling

__all__ = [
    "DEFAULT_URL",
    "Call",
    "base_url",
    "close_session",
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
    "parse_answer",
    "parse_metrics",
    "restore_session",
    "rewind_session",
    "sampling_fields",
    "show_session",
    "spill_session",
    "start_turn",
]


DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `body` is sent as JSON.

    `carried_out` are the codes of refusals that, after an attempt whose answer was lost, say that it had been
    carried out.
    """

    method: str
    path: str
    body: Body | None = None
    carried_out: tuple[str, ...] = ()


def new_id(kind: str) -> str:
    """A name that nobody else has: `s` for sessions, `t` for turns, `r` for requests."""
    return f"{kind}-{secrets.token_hex(8)}"


def base_url(url: str) -> str:
    """The server's address without what people paste after it: a slash, or OpenAI's `/v1`."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address of a server begins with http:// or https://, not {url!r}")
    return url


def models() -> Call:
    return Call("GET", "/v1/models")


def memory() -> Call:
    return Call("GET", "/v1/memory")


def metrics() -> Call:
    return Call("GET", "/metrics")


def list_sessions() -> Call:
    return Call("GET", "/v1/sessions")


def show_session(session_id: str) -> Call:
    return Call("GET", _session(session_id))


def open_session(
    session_id: str | None, system: str | None, ttl: float | None, metadata: Mapping[str, str] | None
) -> Call:
    """Open a session under an id of the client's own, so that asking twice opens one."""
    fields = {"id": session_id or new_id("s"), "ttl": ttl, "metadata": metadata, "system": system}
    return Call("POST", "/v1/sessions", _stated(fields), ("session_exists",))


def close_session(session_id: str) -> Call:
    return Call("DELETE", _session(session_id))


def start_turn(
    session_id: str,
    said: Said,
    sampling: Sampling,
    *,
    turn_id: str | None,
    on_abort: str,
    timeout: float | None,
) -> Call:
    """A turn whose answer is streamed; its id is the client's own, so that it is carried out once."""
    body = {
        "turn_id": turn_id or new_id("t"),
        "input": input_of(said),
        "sampling": sampling_fields(sampling),
        "stream": True,
        "on_abort": on_abort,
        "timeout": timeout,
    }
    return Call("POST", _session(session_id, "turns"), _stated(body))


def interrupt_session(session_id: str, turn_id: str | None, keep: Keep, heard: int | None) -> Call:
    return Call(
        "POST",
        _session(session_id, "interrupt"),
        _stated({"turn_id": turn_id, **keep_fields(keep, heard)}),
        ("turn_not_found",),
    )


def rewind_session(session_id: str, turns: int) -> Call:
    return Call("POST", _session(session_id, "rewind"), {"to_turn": turns, "request_id": new_id("r")})


def fork_session(session_id: str, child_id: str | None, at_turn: int | None) -> Call:
    body = {"id": child_id or new_id("s"), "at_turn": at_turn, "request_id": new_id("r")}
    return Call("POST", _session(session_id, "fork"), _stated(body), ("session_exists",))


def spill_session(session_id: str, tier: str | None) -> Call:
    return Call("POST", _session(session_id, "spill"), _stated({"tier": tier}), ("cannot_spill",))


def restore_session(session_id: str) -> Call:
    return Call("POST", _session(session_id, "restore"), {}, ("cannot_restore",))


def generate(
    model: str, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], sampling: Sampling
) -> Call:
    prompts = prompt if isinstance(prompt, str) else list(prompt)
    return Call("POST", "/v1/completions", {"model": model, "prompt": prompts, **sampling_fields(sampling)})


def input_of(said: Said) -> str | list[int] | list[Message]:
    """What was said, as JSON carries it; a list is of token ids or of messages, never of both."""
    if isinstance(said, str):
        return said
    tokens = [part for part in said if isinstance(part, int) and not isinstance(part, bool)]
    messages: list[Message] = [dict(part) for part in said if isinstance(part, Mapping)]
    if len(tokens) == len(said):
        return tokens
    if len(messages) == len(said):
        return messages
    raise TypeError("say text, a list of token ids, or a list of messages such as {'role': …, 'content': …}")


def sampling_fields(sampling: Sampling) -> Body:
    """Sampling as JSON carries it."""
    fields: Body = dict(sampling)
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    return fields


def keep_fields(keep: Keep, heard: int | None) -> Body:
    """What an interruption keeps; `heard` is how many tokens this client has handed out of the turn."""
    if keep == "heard":
        return {"keep": "all"} if heard is None else {"keep_tokens": heard}
    if isinstance(keep, str):
        return {"keep": keep}
    return {"keep_tokens": keep}


def _session(session_id: str, verb: str = "") -> str:
    path = f"/v1/sessions/{quote(session_id, safe='')}"
    return f"{path}/{verb}" if verb else path


def _stated(fields: Mapping[str, object]) -> Body:
    """Without what was left open: the server has its own defaults."""
    return {name: value for name, value in fields.items() if value is not None}


def parse_answer(body: bytes) -> Body:
    """The JSON object that a call is answered with."""
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise ProtocolError("the answer is no JSON; is the address that of a Holdfast server?") from error
    if not isinstance(answer, dict):
        raise ProtocolError("the answer is no JSON object; is the address that of a Holdfast server?")
    return answer


def parse_metrics(page: bytes) -> dict[str, float]:
    """The samples of a Prometheus page, each by its name with its labels as the page writes them."""
    lines = (line for line in page.decode().splitlines() if line and not line.startswith("#"))
    try:
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    except ValueError as error:
        raise ProtocolError("the page of metrics is not understood") from error
