"""What a caller may ask of sampling.

`Sampling` is validated when it is made: a wrong value is an error that names its field. What a caller leaves
open (None) is filled from the checkpoint's own defaults by `with_defaults`. The tensors are in `sampler`, and
`stops` finds the stop strings. Used by the engine and the server.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from holdfast.models.generation import GenerationDefaults

SEED_MAX = (1 << 63) - 1
INTEGER_MAX = 1 << 31
STOPS_MAX = 64
STOP_CHARACTERS_MAX = 4096
STOP_TOKENS_MAX = 4096
BIASED_TOKENS_MAX = 4096
CHOICES_MAX = 128
LOGPROBS_MAX = 100

_GOLDEN = 0x9E3779B97F4A7C15


class SamplingError(ValueError):
    """A sampling parameter has a value that cannot be; `param` is its name."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn is to be generated. None means: as the model's makers suggest, or off.

    `logprobs` is how many of the most likely tokens to report beside the sampled one (0: the sampled one
    alone); they are of the model's own distribution, before temperature, penalties and bias.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    keep_stop: bool = False
    """Whether the stop string stays in the text."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids))
        set_field(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        self._check_numbers()
        self._check_lists()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_numbers(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError("min_tokens", "is more than max_tokens")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise SamplingError("top_p", "must be more than 0")
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _whole("seed", self.seed, -SEED_MAX - 1, SEED_MAX)
        _whole("n", self.n, 1, CHOICES_MAX)
        _whole("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_MAX)

    def _check_lists(self) -> None:
        stops: tuple[object, ...] = self.stop_strings
        if len(stops) > STOPS_MAX:
            raise SamplingError("stop", f"may have at most {STOPS_MAX} strings")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= STOP_CHARACTERS_MAX:
                raise SamplingError("stop", f"needs strings of 1 to {STOP_CHARACTERS_MAX} characters")
        if len(self.stop_token_ids) > STOP_TOKENS_MAX:
            raise SamplingError("stop_token_ids", f"may name at most {STOP_TOKENS_MAX} tokens")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        if len(self.logit_bias) > BIASED_TOKENS_MAX:
            raise SamplingError("logit_bias", f"may name at most {BIASED_TOKENS_MAX} tokens")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuses token ids that the model does not have."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in tokens if token >= vocabulary]
            if outside:
                raise SamplingError(name, f"names a token past the vocabulary of {vocabulary}")

    def with_defaults(self, defaults: GenerationDefaults) -> Sampling:
        """Everything that was left open, filled in: first by the checkpoint, then by plain sampling.

        A seed is drawn where none was given, so that the turn keeps it whatever happens to its memory.
        """

        def chosen(asked: float | None, suggested: float | None, plain: float) -> float:
            if asked is not None:
                return asked
            return plain if suggested is None else suggested

        return replace(
            self,
            temperature=chosen(self.temperature, defaults.temperature, 1.0),
            top_p=chosen(self.top_p, defaults.top_p, 1.0),
            top_k=int(chosen(self.top_k, defaults.top_k, 0)),
            min_p=chosen(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=chosen(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            seed=secrets.randbelow(SEED_MAX) if self.seed is None else self.seed,
        )

    def choice(self, index: int) -> Sampling:
        """The parameters of one of `n` choices: a seed of its own, derived from the given one."""
        if not 0 <= index < self.n:
            raise SamplingError("n", f"has choices 0 to {self.n - 1}")
        seed = self.seed
        if seed is not None and index:
            seed = (seed ^ (index * _GOLDEN)) & SEED_MAX
        return replace(self, n=1, seed=seed)


def _whole(name: str, value: object, low: int, high: int = INTEGER_MAX) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(name, "must be a whole number")
    if not low <= value <= high:
        raise SamplingError(name, f"must be between {low} and {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SamplingError(name, "must be a finite number")
    if not low <= value <= high:
        raise SamplingError(name, f"must be between {low} and {high}")
