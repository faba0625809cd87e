"""What SGLang's clients send to `/generate`.

One body may hold several prompts: `asked_of` takes it apart. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from holdfast.core.tokens import TOKEN_MAX
from holdfast.engine.sampling import LOGPROBS_MAX, Sampling
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.dialects.tables import GENERATE
from holdfast.server.http.problems import bad_field
from holdfast.server.limits import PROMPTS_MAX
from holdfast.server.sessions import new_name, require_name

__all__ = ["GENERATE_BODY", "Asked", "GenerateBody", "SessionParams", "asked_of", "input_field"]

Token = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]
Start = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
Tops = Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]


class GenerateSampling(msgspec.Struct):
    """How to generate; fields left out, or null, are plain sampling, not the checkpoint's defaults."""


class SessionParams(msgspec.Struct):
    """The session of a request, and which of its tokens come before the request's own."""

    id: str | None = None
    rid: str | None = None
    offset: Offset | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateBody(msgspec.Struct):
    """Text or token ids to continue, one or several."""

    text: str | list[str] | None = None
    input_ids: list[Token | list[Token]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Tops | list[Tops] | None = None
    return_text_in_logprobs: bool = False
    session_params: SessionParams | None = None

    @property
    def session(self) -> SessionParams | None:
        """The session of the request, if it names one."""
        named = self.session_params
        return named if named is not None and named.id is not None else None


SAMPLING = make_body(GenerateSampling, GENERATE.sampling, GENERATE.answer)
GENERATE_BODY = make_body(
    GenerateBody, GENERATE.turn, nested={"sampling_params": SAMPLING}, add_special_tokens=(True,)
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a body: its name, its input and how to answer it."""

    rid: str
    text: str | None
    tokens: list[int] | None
    sampling: Sampling
    answer: AnswerOptions
    start: int
    """First token of the prompt to report log-probabilities of; -1 for none."""
    spelled: bool
    """Whether log-probabilities carry the tokens' text."""

    @property
    def empty(self) -> bool:
        """Whether it has no input of its own."""
        return not self.text and not self.tokens


def asked_of(body: GenerateBody) -> tuple[list[Asked], bool]:
    """The prompts of a body, and whether the answer is a list."""
    refuse_unbuilt(body)
    inputs, single = _inputs(body)
    count = len(inputs)
    wanted = _each(body.return_logprob, False, "return_logprob", count)
    starts = _each(body.logprob_start_len, -1, "logprob_start_len", count)
    tops = _each(body.top_logprobs_num, 0, "top_logprobs_num", count)
    starts = [start if want else -1 for start, want in zip(starts, wanted, strict=True)]
    tops = [top if want else None for top, want in zip(tops, wanted, strict=True)]
    params = _each(body.sampling_params, SAMPLING.read(), "sampling_params", count)
    sampling = [_sampling(*each) for each in zip(params, tops, starts, strict=True)]
    choices = sampling[0].n
    if any(each.n != choices for each in sampling):
        raise bad_field("sampling_params.n", "must be the same for the whole batch")
    if count * choices > PROMPTS_MAX:
        raise bad_field(input_field(body), f"may ask for at most {PROMPTS_MAX} answers")
    many = not single or choices > 1
    if many and body.session is not None:
        raise bad_field("session_params", "with several answers is not supported yet", "unsupported")
    names = _names(body, single, inputs)
    asked = [
        Asked(
            names[number],
            text,
            tokens,
            sampling[number],
            GENERATE.answer.read(params[number]),
            starts[number],
            body.return_text_in_logprobs,
        )
        for number, (text, tokens) in enumerate(inputs)
    ]
    return asked, many


def _sampling(params: Any, logprobs: int | None, start: int) -> Sampling:
    """The sampling of one prompt."""
    refuse_unbuilt(params, GENERATE.sampling.prefix)
    most, least = params.max_new_tokens, params.min_new_tokens or 0
    if most is not None and least > most:
        raise bad_field("sampling_params.min_new_tokens", "must not be more than max_new_tokens")
    return GENERATE.sampling.read(params, logprobs=logprobs, prompt_logprobs=logprobs if start >= 0 else None)


def input_field(body: GenerateBody) -> str:
    """The client's name of its input."""
    return "input_ids" if body.text is None else "text"


Prompt = tuple[str | None, list[int] | None]


def _inputs(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the request is for a single one."""
    if (body.text is None) == (body.input_ids is None):
        raise bad_field("text", "give either text or input_ids")
    if isinstance(body.text, str):
        return [(body.text, None)], True
    if body.text is not None:
        if not body.text:
            raise bad_field("text", "must hold at least one prompt", "empty_turn")
        return [(text, None) for text in body.text], False
    given = body.input_ids or []
    lists = [entry for entry in given if isinstance(entry, list)]
    if not lists:
        return [(None, [entry for entry in given if isinstance(entry, int)])], True
    if len(lists) != len(given):
        raise bad_field("input_ids", "must not mix token ids with lists of them")
    return [(None, entry) for entry in lists], False


def _each(given: Any, default: Any, name: str, count: int) -> list[Any]:
    """A field for each of `count` prompts: one value for all, or a list of as many."""
    if given is None:
        return [default] * count
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise bad_field(name, "must have as many entries as there are prompts")
    return given


def _names(body: GenerateBody, single: bool, inputs: Sequence[Prompt]) -> list[str]:
    """The name of each prompt's request: the client's, or a random one."""
    rid = body.rid
    if rid is None:
        return [new_name("r") for _ in inputs]
    if isinstance(rid, str):
        require_name(rid, "rid")
        return [rid] if single else [require_name(f"{rid}_{number}", "rid") for number in range(len(inputs))]
    if len(rid) != len(inputs) or len(set(rid)) != len(rid):
        raise bad_field("rid", "must have a different name for each prompt")
    return [require_name(name, "rid") for name in rid]
