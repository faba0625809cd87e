"""What SGLang's clients send to `/generate`, and the form in which they want it answered.

Bodies are decoded with a range for every number, so that nothing has to be looked at twice. One body may ask
for several things at once: `asked_of` takes it apart. `Said` is one choice as it grows, in SGLang's own
fields; its text and its token ids are whole in every chunk. Nothing here waits. Used by the native door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any

import msgspec

from holdfast.core.tokens import TOKEN_MAX
from holdfast.engine.sampling import CHOICES_MAX, LOGPROBS_MAX, Sampling
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.server.http.problems import bad_field
from holdfast.server.limits import PROMPTS_MAX
from holdfast.server.link import wire
from holdfast.server.routes.sessions import biases
from holdfast.server.service import make_sampling
from holdfast.server.sessions import new_name, require_name
from holdfast.server.unbuilt import refuse_unbuilt, refusing

__all__ = ["FIELDS", "READ_GENERATE", "Asked", "GenerateBody", "Said", "SessionParams", "asked_of"]

GREEDY_BELOW = 1e-6
"""A temperature below this is none."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Token = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]
Start = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
Tops = Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Floor = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]


class NativeSampling(msgspec.Struct):
    """How to generate. What is left out, or null, is plain sampling, whatever the model's makers suggest."""

    max_new_tokens: Count | None = 128
    min_new_tokens: Count | None = 0
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Floor | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    sampling_seed: Seed | None = None
    n: Choices | None = None

    @property
    def choices(self) -> int:
        """How many answers."""
        return self.n if self.n is not None else 1

    @property
    def silent(self) -> bool:
        """Whether the prompt is only to be computed."""
        return self.max_new_tokens == 0

    def made(self, logprobs: int | None, prompt_logprobs: int | None) -> Sampling:
        """The engine's sampling, which generates at least one token."""
        most, least = self.max_new_tokens, self.min_new_tokens or 0
        if most is not None and least > most:
            raise bad_field("sampling_params.min_new_tokens", "must not be more than max_new_tokens")
        temperature = 1.0 if self.temperature is None else self.temperature
        return make_sampling(
            FIELDS,
            max_tokens=most if most is None else max(1, most),
            min_tokens=least,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            min_p=self.min_p or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            stop=() if self.stop is None else self.stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos or False,
            skip_special_tokens=self.skip_special_tokens is not False,
            keep_stop=self.no_stop_trim or False,
            logit_bias={} if self.logit_bias is None else biases(self.logit_bias, FIELDS["logit_bias"]),
            seed=self.sampling_seed,
            n=self.choices,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
FIELDS = {
    **{name: f"sampling_params.{name}" for name in NativeSampling.__struct_fields__},
    **{name: f"sampling_params.{given}" for name, given in _RENAMED.items()},
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
"""What the fields of a turn are called here."""


class SessionParams(msgspec.Struct):
    """Which session a request belongs to, and what of it comes before the request's own tokens."""

    id: str | None = None
    rid: str | None = None
    offset: Offset | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateBody(msgspec.Struct):
    """Text or token ids to go on with, one or several."""

    text: str | list[str] | None = None
    input_ids: list[Token | list[Token]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Tops | list[Tops] | None = None
    return_text_in_logprobs: bool = False
    session_params: SessionParams | None = None
    timeout: float | None = None

    @property
    def session(self) -> SessionParams | None:
        """The session that is meant, if one is."""
        named = self.session_params
        return named if named is not None and named.id is not None else None


_READ_SAMPLING = refusing(NativeSampling)
READ_GENERATE = refusing(
    GenerateBody,
    nested={"sampling_params": _READ_SAMPLING | GenericAlias(list, (_READ_SAMPLING,)) | None},
    add_special_tokens=(True,),
)
"""Bodies as they are read: with the fields that are refused by name."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a body, with its name and how it is to be answered."""

    rid: str
    text: str | None
    tokens: list[int] | None
    params: NativeSampling
    logprobs: int | None
    """How many of the likeliest tokens to report beside each; None for no log-probabilities."""
    start: int
    """From which token of the prompt on log-probabilities are wanted; -1 for none of it."""
    spelled: bool
    """Whether log-probabilities carry the tokens' text."""

    @property
    def empty(self) -> bool:
        """Whether it brings nothing of its own."""
        return not self.text and not self.tokens


def asked_of(body: GenerateBody) -> tuple[list[Asked], bool]:
    """The prompts of a body, and whether the answer is a list."""
    refuse_unbuilt(body)
    inputs, single = _inputs(body)
    params = _each(body.sampling_params, NativeSampling(), "sampling_params", len(inputs))
    for each in params:
        refuse_unbuilt(each, "sampling_params.")
    many = not single or params[0].choices > 1
    if len({each.choices for each in params}) > 1:
        raise bad_field("sampling_params.n", "must be the same for the whole batch")
    if len(inputs) * params[0].choices > PROMPTS_MAX:
        raise bad_field(
            "input_ids" if body.text is None else "text", f"may ask for at most {PROMPTS_MAX} answers"
        )
    if many and body.session is not None:
        raise bad_field("session_params", "with several answers is not supported yet", "unsupported")
    wanted = _each(body.return_logprob, False, "return_logprob", len(inputs))
    starts = _each(body.logprob_start_len, -1, "logprob_start_len", len(inputs))
    tops = _each(body.top_logprobs_num, 0, "top_logprobs_num", len(inputs))
    asked = [
        Asked(
            rid,
            text,
            tokens,
            params[number],
            tops[number] if wanted[number] else None,
            starts[number] if wanted[number] else -1,
            body.return_text_in_logprobs,
        )
        for number, (rid, (text, tokens)) in enumerate(zip(_names(body, single, inputs), inputs, strict=True))
    ]
    return asked, many


Prompt = tuple[str | None, list[int] | None]


def _inputs(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether only one was meant."""
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
    """The name of each prompt's request: the client's, or one that nobody can guess."""
    rid = body.rid
    if rid is None:
        return [new_name("r") for _ in inputs]
    if isinstance(rid, str):
        require_name(rid, "rid")
        return [rid] if single else [require_name(f"{rid}_{number}", "rid") for number in range(len(inputs))]
    if len(rid) != len(inputs) or len(set(rid)) != len(rid):
        raise bad_field("rid", "must name each prompt, each by a name of its own")
    return [require_name(name, "rid") for name in rid]


class Said:
    """One choice as it grows, and how its clients see it."""

    def __init__(
        self,
        rid: str,
        asked: Asked,
        sampling: Sampling,
        tokens: list[int],
        tokenizer: Tokenizer,
        eos: list[int],
    ) -> None:
        """`tokens` are the new ones of its prompt; `eos` those that end the model's answers."""
        self.rid = rid
        self.asked = asked
        self.text = ""
        self.tokens: list[int] = []
        self.prompt: tuple[int, int] | None = None
        self._sampling = sampling
        self._input = tokens
        self._logprobs: list[Any] = []
        self._tops: list[Any] = []
        self._tokenizer = tokenizer
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}

    def add(self, delta: wire.Delta) -> None:
        """More of it."""
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.prompt is not None:
            self.prompt = delta.prompt
        for entry in delta.logprobs or ():
            self._logprobs.append(self._shown(entry.logprob, entry.token))
            self._tops.append([self._shown(top.logprob, top.token) for top in entry.top])

    def chunk(self) -> dict[str, Any]:
        """What has been said so far."""
        prompt, cached = self.prompt if self.prompt is not None else (0, 0)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None,
            "prompt_tokens": prompt,
            "completion_tokens": len(self.tokens),
            "cached_tokens": cached,
        }
        self._add_logprobs(meta, None)
        return {"text": self.text, "output_ids": self.tokens, "meta_info": meta}

    def whole(self, end: wire.End) -> dict[str, Any]:
        """The choice when it is over; what an aborted one had said is in it."""
        finished = end.outcome == "finished"
        silent = finished and self.asked.params.silent
        if silent:
            self.text, self.tokens, self._logprobs, self._tops = "", [], [], []
        reason: dict[str, Any]
        if not finished:
            reason = {"type": "abort", "message": end.reason, "status_code": None, "err_type": None}
        elif end.reason == "stop" and not silent:
            reason = {"type": "stop", "matched": self._matched()}
        else:
            reason = {"type": "length", "length": len(self.tokens)}
        meta = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "cached_tokens": end.cached_tokens,
            "num_retractions": end.retracts,
            "e2e_latency": end.total_seconds,
        }
        self._add_logprobs(meta, end)
        return {"text": self.text, "output_ids": self.tokens, "meta_info": meta}

    def _matched(self) -> int | str:
        """What ended it: a token, which is then trimmed from the text or shown as was asked; or a string."""
        last = self.tokens[-1]
        if last not in self._ends:
            stops = self._sampling.stop_strings
            heard = self._tokenizer.decode(
                self.tokens, skip_special_tokens=self._sampling.skip_special_tokens
            )
            found = [(heard.find(stop), -len(stop), stop) for stop in stops if stop in heard]
            return min(found)[2] if found else stops[0]
        hidden = self._sampling.skip_special_tokens
        if self._sampling.keep_stop and hidden:
            self.text += self._tokenizer.decode([last], skip_special_tokens=True)
        elif not self._sampling.keep_stop and not hidden:
            self.text = self.text.removesuffix(self._tokenizer.decode([last], skip_special_tokens=False))
        return last

    def _shown(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if self.asked.spelled else None
        return (logprob, token, text)

    def _add_logprobs(self, meta: dict[str, Any], end: wire.End | None) -> None:
        """Log-probabilities, where they were asked for: those of the prompt come with the end."""
        if self.asked.logprobs is None:
            return
        entries, tops = ([], []) if end is None else self._of_prompt(end)
        meta["input_token_logprobs"] = entries
        meta["output_token_logprobs"] = self._logprobs
        meta["output_token_logprobs_length"] = len(self._logprobs)
        if self.asked.logprobs:
            meta["input_top_logprobs"] = tops
            meta["output_top_logprobs"] = self._tops

    def _of_prompt(self, end: wire.End) -> tuple[list[Any], list[Any]]:
        """The prompt's tokens from `start` on; the first of them has no log-probability.

        A session's history was computed before: there, the first one is the turn's own first token.
        """
        if end.prompt_logprobs is None:
            return [], []
        history = end.prompt_tokens - len(self._input)
        start = max(self.asked.start, history)
        later = end.prompt_tokens - start - 1
        if later < 0 or later > len(end.prompt_logprobs):
            return [], []
        known = end.prompt_logprobs[len(end.prompt_logprobs) - later :]
        entries = [self._shown(None, self._input[start - history])]
        entries += [self._shown(entry.logprob, entry.token) for entry in known]
        tops: list[Any] = [None]
        tops += [[self._shown(top.logprob, top.token) for top in entry.top] for entry in known]
        return entries, tops
