"""Sampling parameters of a request: the declaration that every dialect, the wire and the command read.

`Sampling` declares each field once: type, default, bound and meaning. It is validated when it is made; an
invalid value is a `SamplingError` that names its field. Fields left open (None) are filled from the
checkpoint's defaults by `with_defaults`. The tensors are in `step/sampler`, stop strings in `text/stops`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from holdfast.core.tokens import TOKEN_MAX
from holdfast.engine.fields import INTEGER_MAX, Bound, check_for, declarations, declared
from holdfast.models.generation import GenerationDefaults

__all__ = [
    "CHECKPOINT_FIELDS",
    "CHOICES_MAX",
    "LOGPROBS_MAX",
    "SEED_MAX",
    "STOPS_MAX",
    "STOP_CHARACTERS_MAX",
    "Sampling",
    "SamplingError",
]

SEED_MAX = (1 << 63) - 1
STOPS_MAX = 64
STOP_CHARACTERS_MAX = 4096
CHOICES_MAX = 128
LOGPROBS_MAX = 100

_GOLDEN = 0x9E3779B97F4A7C15


class SamplingError(ValueError):
    """A sampling parameter is invalid; `param` is its name."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn is generated. None means the checkpoint's default, or off."""

    max_tokens: int | None = declared(
        None,
        Bound(0, INTEGER_MAX),
        "Maximum number of tokens to generate; as many as fit if left out. With 0 the input is computed and "
        "kept, and nothing is generated.",
    )
    min_tokens: int = declared(
        0, Bound(0, INTEGER_MAX), "Minimum number of tokens to generate before the turn may end."
    )
    temperature: float | None = declared(
        None, Bound(0.0, 100.0), "Sampling temperature; 0 is greedy.", plain=1.0
    )
    top_p: float | None = declared(
        None,
        Bound(0.0, 1.0, above=True),
        "Nucleus sampling: share of the probability mass to sample from.",
        plain=1.0,
    )
    top_k: int | None = declared(
        None, Bound(-1, INTEGER_MAX), "Sample from the k most likely tokens; 0 or -1 for all.", plain=0
    )
    min_p: float | None = declared(
        None,
        Bound(0.0, 1.0),
        "Minimum probability of a token, relative to the most likely one.",
        plain=0.0,
    )
    repetition_penalty: float | None = declared(
        None,
        Bound(0.01, 100.0),
        "Multiplicative penalty on tokens of the prompt and the output; 1 is off.",
        plain=1.0,
    )
    frequency_penalty: float = declared(
        0.0, Bound(-2.0, 2.0), "Additive penalty on generated tokens, per occurrence."
    )
    presence_penalty: float = declared(0.0, Bound(-2.0, 2.0), "Additive penalty on tokens generated before.")
    logit_bias: Mapping[int, float] = declared(
        {}, Bound(-100.0, 100.0, characters=11, entries=4096), "Added to the logits, by token id."
    )
    seed: int | None = declared(
        None, Bound(-SEED_MAX - 1, SEED_MAX), "Random seed; the server draws one if omitted."
    )
    stop: str | Sequence[str] = declared(
        (),
        Bound(characters=STOP_CHARACTERS_MAX, entries=STOPS_MAX),
        "Strings that end the turn; cut from the text.",
    )
    stop_token_ids: Sequence[int] = declared(
        (), Bound(0, TOKEN_MAX, entries=4096), "Token ids that end the turn."
    )
    ignore_eos: bool = declared(False, None, "Generate past the model's end-of-sequence tokens.")
    n: int = declared(1, Bound(1, CHOICES_MAX), "Number of choices for each prompt.")
    logprobs: int | None = declared(
        None,
        Bound(0, LOGPROBS_MAX),
        "Report log-probabilities of the sampled tokens and of so many most likely ones, taken before "
        "temperature, penalties, bias and grammars.",
    )
    prompt_logprobs: int | None = declared(
        None, Bound(0, LOGPROBS_MAX), "Report log-probabilities of the prompt's tokens in the same way."
    )
    skip_special_tokens: bool = declared(True, None, "Leave special tokens out of the text.")
    keep_stop: bool = declared(False, None, "Keep the stop string in the text.")

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids))
        set_field(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        for name, default, check, bound in _CHECKED:
            value = getattr(self, name)
            if value is default or value is None:
                continue
            problem = check(value, bound)
            if problem is not None:
                raise SamplingError(name, problem)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError("min_tokens", "is more than max_tokens")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise `SamplingError` for token ids outside the model's vocabulary."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in tokens if token >= vocabulary]
            if outside:
                raise SamplingError(name, f"names a token past the vocabulary of {vocabulary}")

    def with_defaults(self, defaults: GenerationDefaults) -> Sampling:
        """Fill the fields left open: from the checkpoint first, then with plain sampling.

        A seed is drawn where none was given, so that a turn that is computed again samples the same tokens.
        """
        filled: dict[str, Any] = {}
        for name, plain in _PLAIN:
            if getattr(self, name) is None:
                suggested = getattr(defaults, name)
                filled[name] = plain if suggested is None else suggested
        if self.seed is None:
            filled["seed"] = secrets.randbelow(SEED_MAX)
        return replace(self, **filled)

    def choice(self, index: int) -> Sampling:
        """The parameters of one of `n` choices, with a seed derived from the given one."""
        if not 0 <= index < self.n:
            raise SamplingError("n", f"has choices 0 to {self.n - 1}")
        seed = self.seed
        if seed is not None and index:
            seed = (seed ^ (index * _GOLDEN)) & SEED_MAX
        return replace(self, n=1, seed=seed)


_DECLARED = declarations(Sampling)
_CHECKED = tuple(
    (name, each.default, check, each.bound)
    for name, each in _DECLARED.items()
    if each.bound is not None and (check := check_for(each.kind)) is not None
)
_PLAIN = tuple((name, each.plain) for name, each in _DECLARED.items() if each.plain is not None)

CHECKPOINT_FIELDS = tuple(name for name, _ in _PLAIN)
"""Fields that a checkpoint may have defaults for."""
"""Fields that a checkpoint may suggest, and their values where it does not."""
