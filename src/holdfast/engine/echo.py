"""A model without weights that repeats its input, at no cost.

`holdfast serve echo` is for testing clients, and for measuring the overhead of the server itself. The
scheduler, the ledger, the audit and the server are real; only the tensors are missing. Under a grammar it
generates its input if that matches, and otherwise as few allowed tokens as possible. `echo` has the
memory of a dense model, `echo-window` of a sliding-window one, `echo-hybrid` of one with recurrent state. A
token is one byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE

from holdfast.core.plan import Row, RowResult, StepResult
from holdfast.core.registry import Plan
from holdfast.core.turn import Turn
from holdfast.engine.constraints.compiler import Builder
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.constraints.guidance import GuidanceBuilder
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.turn import TurnConstraint
from holdfast.engine.constraints.vocabulary import Vocabulary
from holdfast.engine.durable.membership import Identity, Membership
from holdfast.engine.grammars import Grammars
from holdfast.engine.listeners import SessionObserver
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import EngineOptions
from holdfast.engine.start.assembly import Clock, build_loop
from holdfast.engine.start.setup import AnswerSetup, formats_of
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.runner import DeviceGuard
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.host import HostTier
from holdfast.models.config import ModelConfig
from holdfast.models.families import family_of
from holdfast.models.fields import Fields, Json
from holdfast.models.generation import GenerationDefaults
from holdfast.models.layout import MemoryShape, memory_shape

__all__ = ["echo_tokenizer", "open_echo"]

CONTEXT_LENGTH = 32_768
KV_TOKENS = 1 << 20
STATE_SLOTS = 4096
CPU = torch.device("cpu")

START, END = "<|start|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_DENSE: dict[str, Json] = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_SHAPES: dict[str, tuple[str, dict[str, Json]]] = {
    "echo": ("LlamaForCausalLM", _DENSE),
    "echo-window": ("MistralForCausalLM", {**_DENSE, "sliding_window": 256}),
    "echo-hybrid": (
        "BambaForCausalLM",
        {
            **_DENSE,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class EchoModel:
    """The description of a model without weights."""

    config: ModelConfig
    context_length: int
    memory_shape: MemoryShape
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32


def echo_model(name: str, context_length: int | None) -> EchoModel:
    """The model with one of the shapes of memory; its context may have any length."""
    architecture, fields = _SHAPES[name]
    config = family_of(architecture).configure(Fields(dict(fields), name), architecture)
    length = context_length if context_length is not None else CONTEXT_LENGTH
    return EchoModel(config, length, memory_shape(config))


class EchoExecutor:
    """Runs every plan at once: a turn repeats its last message until it is ended."""

    def __init__(self, stream_of: Callable[[Turn], TurnStream], end: int) -> None:
        self.stream_of = stream_of
        self.end = end
        self.host_tier = HostTier()
        self.guard = DeviceGuard(torch.device("cpu"))
        self._words: dict[int, list[int]] = {}
        self._mask = MaskRows.allocated(1, end + 2)

    def start(self, plan: Plan) -> Flight:
        """Nothing to launch."""
        return Flight(plan, None, None, [])

    def sample(self, flight: Flight) -> None:
        """Nothing to sample."""

    def finish(self, flight: Flight) -> StepResult:
        """The next byte of every row."""
        return StepResult([self._row(row) for row in flight.plan.rows], [True] * len(flight.plan.moves))

    def _row(self, row: Row[Turn]) -> RowResult:
        turn = row.turn
        if not turn.over:
            self._note_prompt(self.stream_of(turn))
        if not row.sample:
            return RowResult([])
        if turn.over:
            return RowResult([self.end])
        stream = self.stream_of(turn)
        words = self._words.get(turn.number)
        if words is None:
            words = self._words[turn.number] = [*self._message(self._heard(turn, stream)), self.end]
        token = words[(row.start + row.count - turn.input_end) % len(words)]
        if stream.constraint is not None:
            token = self._allowed(stream.constraint, token)
        logprobs = [TokenLogprob(token, 0.0)] if stream.sampling.logprobs is not None else None
        return RowResult(stream.push([token], logprobs), stream.finish)

    def _note_prompt(self, stream: TurnStream) -> None:
        """Every token of a prompt is certain, too."""
        if stream.sampling.prompt_logprobs is not None and not stream.prompt_logprobs:
            later = stream.prompt_tokens[stream.input_first + 1 :]
            stream.prompt_logprobs += [TokenLogprob(token, 0.0) for token in later]

    def _allowed(self, constraint: TurnConstraint, token: int) -> int:
        """The token that comes next under a constraint: this one, or one that brings the text to its end."""
        if constraint.free:
            return token
        forced = constraint.forced()
        matcher = constraint.matcher
        if forced or matcher is None:
            return forced[0] if forced else self.end
        if matcher.validate([token]):
            return token
        matcher.fill(self._mask, 0)
        allowed = set(self._mask.allowed(0))
        return next(
            (each for each in (self.end, *CLOSING) if each in allowed), min(allowed, default=self.end)
        )

    def _heard(self, turn: Turn, stream: TurnStream) -> Sequence[int]:
        """The input of a turn, or all that came before where the input does no more than open the answer."""
        tokens = turn.request.tokens
        if self.end in tokens or len(tokens) > len(OPENING):
            return tokens
        prompt = stream.prompt_tokens
        return prompt if prompt[-len(OPENING) :] == OPENING else tokens

    def _message(self, tokens: Sequence[int]) -> list[int]:
        """The bytes of the last message, without special tokens and role."""
        ends = [place for place, token in enumerate(tokens) if token == self.end]
        if not ends:
            return [token for token in tokens if token < self.end]
        start = max((place for place in range(ends[-1]) if tokens[place] == self.end + 1), default=-1)
        said = tokens[start + 1 : ends[-1]]
        return list(said[said.index(NEWLINE) + 1 :]) if start >= 0 and NEWLINE in said else list(said)

    def capture_next(self, missed: bool) -> bool:  # noqa: ARG002
        """Nothing to capture."""
        return False

    def abandon_graphs(self) -> None:
        """Nothing to abandon."""

    @property
    def graphs(self) -> None:
        """No graphs."""

    def release(self, turn: Turn) -> None:
        """Forget a turn that is over."""
        self._words.pop(turn.number, None)


def echo_tokenizer() -> Tokenizer:
    """One token for each byte, then the two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    end = len(letters)
    assert encoder.token_to_id(END) == end, "the special tokens follow the bytes"
    return Tokenizer(encoder, template=TEMPLATE, names={"eos_token": END}, eos_tokens=(end,))


NEWLINE = echo_tokenizer().encode("\n")[0]
OPENING = echo_tokenizer().encode(f"{START}assistant\n")
CLOSING = echo_tokenizer().encode('"}]')
"""What brings JSON to its end, tried in this order where the echo is not allowed."""


@cache
def echo_builder() -> Builder | None:
    """The compiler of grammars for bytes; None without llguidance."""
    tokenizer = echo_tokenizer()
    try:
        vocabulary = Vocabulary(tokenizer, size=tokenizer.vocabulary_size, end_tokens=tokenizer.eos_tokens)
        return GuidanceBuilder(vocabulary)
    except GrammarError:
        return None


def open_echo(
    name: str,
    options: EngineOptions,
    observer: SessionObserver | None = None,
    clock: Clock = time.monotonic,
    member: Membership | None = None,
) -> EngineLoop:
    """The loop of a model that repeats its input."""
    if options.kv_tokens is None:
        options = replace(options, kv_tokens=KV_TOKENS)
    if options.window_tokens is None:
        options = replace(options, window_tokens=KV_TOKENS)
    if options.state_slots is None:
        options = replace(options, state_slots=STATE_SLOTS)
    tokenizer = echo_tokenizer()
    end = tokenizer.eos_tokens[0]
    formats = formats_of(options, tokenizer, {})
    return build_loop(
        echo_model(name, options.context_length),
        tokenizer,
        GenerationDefaults((end,)),
        options,
        runner=lambda stream_of: EchoExecutor(stream_of, end),
        answers=AnswerSetup(
            formats, Grammars(echo_builder(), "constrained output needs the package llguidance")
        ),
        observer=observer,
        clock=clock,
        identity=Identity(member=member),
    )
