"""Text to tokens and back: encoding, decoding, streaming detokenisation, chat templates.

A `Tokenizer` comes from a Hugging Face directory (tokenizer.json) or from GGUF metadata; it is immutable, so
threads may share it. A `Detokenizer` belongs to one stream of tokens and emits whole characters, which
concatenate to `decode` of all its tokens. It is our own: `tokenizers.decoders.DecodeStream` has no way to
flush its end, holds back invalid UTF-8 without limit in quadratic time, and raises on some byte sequences
(docs/decisions/0019). Used by the engine and the server.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer as Encoder
from tokenizers import decoders

from holdfast.engine.text.chat_renderer import ChatRenderer
from holdfast.engine.text.chat_template import (
    TEMPLATE_CHARACTERS_MAX,
    ChatTemplate,
    ChatTemplateError,
    Message,
    PromptEnd,
)
from holdfast.engine.text.control_tokens import ControlTokens, Disguise
from holdfast.engine.text.gguf_vocabulary import build_tokenizer
from holdfast.engine.tools.events import Call
from holdfast.engine.tools.request import Tool
from holdfast.engine.tools.response_template import ResponseTemplate, TemplateRefused, read_response_template
from holdfast.models.fields import ConfigurationError, Fields, reading, require_size

if TYPE_CHECKING:  # text processes run without torch
    from holdfast.models.checkpoint import Checkpoint

log = logging.getLogger("holdfast.engine")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_TOKENIZER_BYTES_MAX = 256 << 20
_HELD_TOKENS_MAX = 5
"""Tokens after which an incomplete character is emitted anyway: a character has at most four bytes."""

_OPENINGS_KEPT = 64
_OPENING_KEY_CHARACTERS = 1000

PROBED_BYTES_PER_TOKEN = 8
"""Above this many bytes per allowed token a text is counted in portions before it is encoded as a whole."""
PORTION_CHARACTERS = 1 << 16
PORTION_SLACK = 2
"""Factor by which the portions' tokens must exceed the limit to reject the text: each cut changes the tokens
around it, by less than half of them in any vocabulary in use.
"""
COMPOSING_FACTOR = 3
"""How much a composing normaliser may shorten a text, in bytes."""


class TooManyTokens(ValueError):
    """A text exceeds its token limit; `tokens` is a lower bound, if counted."""

    def __init__(self, tokens: int | None, most: int) -> None:
        super().__init__(f"the text has more than {most} tokens")
        self.tokens = tokens


def _byte_of_character() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class Detokenizer(Protocol):
    """Turns one stream of tokens into text incrementally."""

    def add(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Flush held-back text, at the end of the stream."""
        ...


class RenderedChat(NamedTuple):
    """A conversation as its template writes it, ready for the assistant's answer.

    `text` has placeholders for names of control tokens in messages: the same messages give the same text.
    """

    text: str
    disguise: Disguise


class Tokenizer:
    """A vocabulary with its rules, its special tokens and its chat template."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        template: str | None,
        names: Mapping[str, str],
        eos_tokens: tuple[int, ...],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        call_format: str | None = None,
        response_template: object = None,
        secret: bytes = b"",
    ) -> None:
        """`names` are special tokens by role, such as bos_token; `eos_tokens` end a turn. Templates are
        rendered inside `guard`. `call_format` is how the model writes tool calls, where the template does not
        show it; `response_template` is the checkpoint's own description of its answers, as it is written.
        Rendered texts are the same for the same `secret`.
        """
        self.response_template_source = response_template
        self._secret = secret
        self._openings: dict[str, str] = {}
        self._encoder = encoder
        self._call_format = call_format
        self._guard = guard
        self._bytes: dict[int, bytes] = {}
        self._byte_level = isinstance(encoder.decoder, decoders.ByteLevel)
        self._special = frozenset(
            number for number, token in encoder.get_added_tokens_decoder().items() if token.special
        )
        self.names = dict(names)
        self.eos_tokens = eos_tokens
        self.template = None if template is None else ChatTemplate(template, names)

    def writing_calls(self, call_format: str | None) -> Tokenizer:
        """The same tokenizer for a model that writes tool calls in that format."""
        return Tokenizer(
            self._encoder,
            template=None if self.template is None else self.template.source,
            names=self.names,
            eos_tokens=self.eos_tokens,
            guard=self._guard,
            call_format=call_format,
            response_template=self.response_template_source,
            secret=self._secret,
        )

    def written(self) -> str:
        """The tokenizer serialised as JSON, for `read_encoder`."""
        return self._encoder.to_str()

    def identity(self) -> str:
        """A digest of everything that gives token ids their meaning: vocabulary, added tokens and merges.

        It does not depend on order or layout of the file.
        """
        model = json.loads(self.written())["model"]
        merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges", ())]
        added = {
            number: (token.content, token.special)
            for number, token in self._encoder.get_added_tokens_decoder().items()
        }
        found = hashlib.sha256()
        for part in (sorted(self._encoder.get_vocab().items()), sorted(added.items()), merges):
            found.update(json.dumps(part).encode())
        return found.hexdigest()[:32]

    @property
    def vocabulary_size(self) -> int:
        return self._encoder.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The number of each token, by its text; added tokens included."""
        return self._encoder.get_vocab(with_added_tokens=True)

    @property
    def special_tokens(self) -> frozenset[int]:
        """Special tokens, which `decode` leaves out by default."""
        return self._special

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The texts of tokens that were added to the vocabulary, special ones among them."""
        return {number: token.content for number, token in self._encoder.get_added_tokens_decoder().items()}

    def token_of(self, text: str) -> int | None:
        """The id of a token by its exact text."""
        return self._encoder.token_to_id(text)

    @cached_property
    def bytes_per_token(self) -> int:
        """Longest token in bytes: a text of more than n times as many bytes has more than n tokens."""
        space = "\u2581"
        texts = self._encoder.get_vocab(with_added_tokens=True)
        if self._byte_level:
            longest = max(map(len, texts), default=1)
            marks = self._encoder.get_added_tokens_decoder().values()
            longest = max(longest, *(len(mark.content.encode()) for mark in marks), 1)
        else:
            longest = max((len(text.replace(space, " ").encode()) for text in texts), default=1)
        return longest * (COMPOSING_FACTOR if _composes(self._encoder) else 1)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The tokens of a text, including special tokens written out in it.

        Raises `TooManyTokens` for more than `most`, in bounded time for texts that are far too long.
        """
        if most is not None:
            self._require_fits(text, most)
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        if most is not None and len(ids) > most:
            raise TooManyTokens(len(ids), most)
        return ids

    def _require_fits(self, text: str, most: int) -> None:
        """Reject a text that is certainly too long, before it is encoded as a whole."""
        if len(text) > most * self.bytes_per_token:
            raise TooManyTokens(None, most)
        if (
            4 * len(text) <= most * PROBED_BYTES_PER_TOKEN
            or len(text.encode()) <= most * PROBED_BYTES_PER_TOKEN
        ):
            return
        count = 0
        for start in range(0, len(text), PORTION_CHARACTERS):
            portion = text[start : start + PORTION_CHARACTERS]
            count += len(self._encoder.encode(portion, add_special_tokens=False).ids)
            if count > PORTION_SLACK * most:
                raise TooManyTokens(None, most)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._encoder.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for ids outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        text = self._encoder.id_to_token(token)
        if text is None:
            return b""
        if not self._byte_level:
            return self._encoder.decode([token], skip_special_tokens=False).encode()
        values = [_BYTE_OF_CHARACTER.get(character) for character in text]
        return bytes(value for value in values if value is not None) if None not in values else text.encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new stream."""
        skipped = self._special if skip_special_tokens else frozenset()
        return _ByteStream(self, skipped) if self._byte_level else _WindowStream(self._encoder, skipped)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        most: int | None = None,
        prompt_end: PromptEnd = PromptEnd.ANSWER,
    ) -> list[int]:
        """The tokens of a conversation, ready for the assistant's answer.

        Control tokens come from the template alone: their names in a message, a tool's description or a
        variable are ordinary text. Raises `ToolsRefused` for calls and results that do not fit together.
        """
        return self.encode_rendered(
            self.render_chat(messages, tools=tools, template_kwargs=template_kwargs, prompt_end=prompt_end),
            most=most,
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        prompt_end: PromptEnd = PromptEnd.ANSWER,
    ) -> RenderedChat:
        """A conversation as text, ready for the assistant's answer."""
        with self._guard():
            prepared = self.chat.prepare(messages, tools or (), template_kwargs)
        disguise = self._controls.disguise(prepared.messages, prepared.variables)
        with self._guard():
            return RenderedChat(self.chat.whole(disguise.messages, disguise.variables, prompt_end), disguise)

    def opening(self, rendered: RenderedChat, template_kwargs: Mapping[str, Any]) -> str:
        """What a rendered conversation ends with for the answer to begin, as a small one shows it.

        Empty where that cannot be told, or where it would be encoded differently after another text.
        """
        key = repr(sorted(template_kwargs.items(), key=lambda item: item[0]))
        known = self._openings.get(key)
        if known is None:
            with self._guard():
                known = self.chat.opening(template_kwargs)
            if len(self._openings) >= _OPENINGS_KEPT:
                self._openings.clear()
            if len(key) <= _OPENING_KEY_CHARACTERS:
                self._openings[key] = known
        tells = bool(known) and rendered.text.endswith(known) and self._controls.begins_with_one(known)
        return known if tells else ""

    def encode_rendered(self, rendered: RenderedChat, start: int = 0, most: int | None = None) -> list[int]:
        """The tokens of a rendered conversation after its first `start` characters."""
        if not start or self._byte_level:
            return self._encode_rendered(rendered.text[start:], rendered.disguise, most)
        # Vocabularies may treat the first text differently: a token before it makes this a later one.
        before = next((text for text in self.names.values() if self._controls.begins_with_one(text)), "")
        tokens = self._encode_rendered(before + rendered.text[start:], rendered.disguise, most)
        return tokens[1:] if before else tokens

    def tokens_before(self, text: str, places: Sequence[int]) -> list[int | None]:
        """How many tokens of a text come before each of some places; None where a token reaches over it.

        Only for vocabularies of bytes, and texts without placeholders: elsewhere it cannot be told.
        """
        if not places or not self._byte_level or self._controls.has_placeholder(text):
            return [None] * len(places)
        spans = self._encoder.encode(text, add_special_tokens=False).offsets
        starts = [start for start, _ in spans]
        found: list[int | None] = []
        for place in places:
            number = bisect_left(starts, place)
            splits = number < len(spans) and starts[number] == place and spans[number - 1][1] <= place
            found.append(number if splits and number else None)
        return found

    def answer_text(self, tokens: Sequence[int], before: int | None = None) -> str:
        """Generated tokens as a rendered conversation would have them, `before` being the token before them.

        Control tokens are their names; names that ordinary tokens spell are placeholders.
        """
        stream = self.detokenizer(skip_special_tokens=False)
        if before is not None:
            stream.add([before])
        controls, parts, first = self._controls, [], 0
        for place, token in enumerate(tokens):
            if token in controls.numbers:
                spelled = stream.add(tokens[first:place]) + stream.finish()
                parts += [controls.disguised(spelled), self.added_tokens[token]]
                first = place + 1
        return "".join([*parts, controls.disguised(stream.add(tokens[first:]) + stream.finish())])

    def encode_continuation(
        self,
        messages: Sequence[Message],
        *,
        last_token: int | None,
        calls: Sequence[Call] = (),
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        most: int | None = None,
        prompt_end: PromptEnd = PromptEnd.ANSWER,
    ) -> list[int]:
        """The tokens that follow the assistant's answer, whose last token was `last_token`.

        Tool messages answer the `calls` that it ended in.
        """
        said_end = ""
        if last_token is not None and last_token in self.eos_tokens:
            said_end = self._encoder.id_to_token(last_token) or ""
        with self._guard():
            prepared = self.chat.prepare(messages, tools or (), template_kwargs, calls=calls, continues=True)
        disguise = self._controls.disguise(prepared.messages, prepared.variables)
        with self._guard():
            text = self.chat.continuation(
                disguise.messages,
                disguise.variables,
                calls=calls,
                said_end=said_end,
                prompt_end=prompt_end,
            )
        return self._encode_rendered(text, disguise, most)

    @cached_property
    def chat(self) -> ChatRenderer:
        """The chat template, with how it takes tools."""
        if self.template is None:
            raise ChatTemplateError("this model has no chat template; send text or token ids instead")
        added = [token.content for token in self._encoder.get_added_tokens_decoder().values()]
        return ChatRenderer(self.template, added, self._call_format, self.response_template)

    @cached_property
    def response_template(self) -> ResponseTemplate | None:
        """The checkpoint's own description of its answers."""
        written = self.response_template_source
        return None if written is None else read_response_template(written)

    def _encode_rendered(self, text: str, disguise: Disguise, most: int | None) -> list[int]:
        if disguise.empty:
            return self.encode(text, add_special_tokens=False, most=most)
        if most is not None:
            self._require_fits(text, most)
        tokens = self._controls.encode(text, disguise)
        if most is not None and len(tokens) > most:
            raise TooManyTokens(len(tokens), most)
        return tokens

    @cached_property
    def _controls(self) -> ControlTokens:
        source = "" if self.template is None else self.template.source
        return ControlTokens(self._encoder, source, self._secret)


class _ByteStream:
    """For byte-level vocabularies: token bytes through an incremental UTF-8 decoder, each decoded once."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, tokens: Iterable[int]) -> str:
        spelled = [self._tokenizer.token_bytes(token) for token in tokens if token not in self._skipped]
        return self._decoder.decode(b"".join(spelled))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For vocabularies whose tokens depend on their neighbours: decodes a window of recent tokens.

    Text is emitted when the new tokens end in a complete character; the previous tokens stay as context,
    which keeps the space at the start of a word.
    """

    def __init__(self, encoder: Encoder, skipped: frozenset[int]) -> None:
        self._encoder = encoder
        self._skipped = skipped
        self._context: list[int] = []
        self._new: list[int] = []

    def add(self, tokens: Iterable[int]) -> str:
        return "".join([self._add(token) for token in tokens if token not in self._skipped])

    def _add(self, token: int) -> str:
        self._new.append(token)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._new) < _HELD_TOKENS_MAX:
            return ""
        self._context, self._new = self._new, []
        return text

    def finish(self) -> str:
        text = self._text()
        self._context, self._new = [], []
        return text

    def _text(self) -> str:
        before = self._encoder.decode(self._context, skip_special_tokens=False)
        both = self._encoder.decode(self._context + self._new, skip_special_tokens=False)
        return both[len(before) :]


def _composes(encoder: Encoder) -> bool:
    """Whether normalisation may shorten a text."""
    steps = [] if encoder.normalizer is None else [json.loads(encoder.normalizer.__getstate__())]
    while steps:
        step = steps.pop()
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return True
        elif step["type"] not in ("Prepend", "Sequence", "ByteLevel"):
            return True
        steps += step.get("normalizers", [])
    return False


def read_encoder(written: str) -> Encoder:
    """A tokenizer serialised by `Tokenizer.written`."""
    return Encoder.from_str(written)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model."""
    with reading(checkpoint.path):
        return _of(checkpoint)


def _of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata is not None:
        return _from_metadata(Fields(checkpoint.metadata, checkpoint.path.name), checkpoint)
    return _from_directory(checkpoint.path, checkpoint.generation.eos_tokens)


def _from_metadata(metadata: Fields, checkpoint: Checkpoint) -> Tokenizer:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    names: dict[str, str] = {}
    for role, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        number = metadata.optional_integer(f"tokenizer.ggml.{key}_token_id", least=0)
        if number is not None and number < len(tokens):
            names[role] = tokens[number]
    template = metadata.text("tokenizer.chat_template") if metadata.has("tokenizer.chat_template") else None
    return Tokenizer(
        build_tokenizer(metadata), template=template, names=names, eos_tokens=checkpoint.generation.eos_tokens
    )


def _from_directory(directory: Path, eos_tokens: tuple[int, ...]) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigurationError(
            f"{directory} has no tokenizer.json; convert its tokenizer with transformers' AutoTokenizer and "
            "save_pretrained, or send token ids"
        )
    with reading(path):
        require_size(path, _TOKENIZER_BYTES_MAX)
        encoder = Encoder.from_file(str(path))
        encoder.no_padding()
        encoder.no_truncation()
    config = directory / "tokenizer_config.json"
    fields = Fields.read(config) if config.exists() else Fields({}, config.name)
    names = {role: text for role in _ROLES if (text := _token_text(fields, role)) is not None}
    end = names.get("eos_token")
    number = None if end is None else encoder.token_to_id(end)
    ends = eos_tokens or ((number,) if number is not None else ())
    jinja = directory / "chat_template.jinja"
    with reading(jinja if jinja.exists() else config):
        return Tokenizer(
            encoder,
            template=_template_of(jinja, fields),
            names=names,
            eos_tokens=ends,
            response_template=_response_template(fields),
        )


def _response_template(fields: Fields) -> object:
    """The description of answers; None if there is none, or none that can be used."""
    written = fields.raw("response_template")
    try:
        if written is not None:
            read_response_template(written)
    except TemplateRefused as error:
        log.warning("%s: %s; answers are read by a named parser", fields.where, error)
        return None
    return written


_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _token_text(fields: Fields, role: str) -> str | None:
    """A special token's text: plain, or the content of an object."""
    value = fields.raw(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of(path: Path, fields: Fields) -> str | None:
    """The chat template: a file, or a configuration key (one, or several by name)."""
    if path.exists():
        require_size(path, TEMPLATE_CHARACTERS_MAX * 4)
        return path.read_text(encoding="utf-8")
    value = fields.raw("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{fields.where}: chat_template must be text, not {value!r:.40}")
    return value
