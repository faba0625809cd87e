"""Tokens equal those of transformers; streams hand out whole characters; chat templates run in a cage."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from holdfast.engine.text import chat_template, gguf_vocabulary
from holdfast.engine.text.chat_template import ChatTemplate, ChatTemplateError
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from holdfast.models.fields import ConfigurationError, Fields

TEXTS = [
    "Hello world",
    "It's 1234 o'clock, costs $5.99!",
    "  leading\n\n\ttabs  trailing  ",
    "日本語テキスト 😀 👩\u200d👩\u200d👧 é e\u0301",
    "<|im_start|>user\nhi<|im_end|> plain <s> </s>",
    "def f(x):\n    return x**2  # ünïcödé",
    "a\u00a0b\u200bc \u06f1\u0661",
    "",
    "....!!!??? \r\n\r\n x",
    "ÀÉÎ can't WON'T I'LL",
    "\N{REPLACEMENT CHARACTER} already broken",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Hi <b>&amp;</b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def train(kind: str) -> Encoder:
    """A small vocabulary of its kind: byte-level, or pieces with a fall-back to bytes."""
    if kind == "bytes":
        encoder = Encoder(models.BPE())
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
        encoder.train_from_iterator(TEXTS * 3, trainer)
        return encoder
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁",
        "▁Hello",
        "▁world",
        "H",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "▁It",
        "'",
        "s",
        "1",
        "2",
        "3",
        "4",
        ",",
        "!",
    ]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *byte_tokens, *words])}
    encoder = Encoder(models.BPE(vocabulary, [], unk_token="<s>", fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(SPECIAL)
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return encoder


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The same directory opened by us and by transformers."""
    path = tmp_path_factory.mktemp(request.param)
    made = PreTrainedTokenizerFast(
        tokenizer_object=train(request.param), bos_token="<s>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    made.save_pretrained(path)
    write_llama_config(path, made.vocab_size)
    return open_tokenizer(open_checkpoint(path)), AutoTokenizer.from_pretrained(path)


def write_llama_config(path: Path, vocabulary: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    (path / "config.json").write_text(json.dumps(config))


def streamed(tokenizer: Tokenizer, tokens: list[int], size: int, skip: bool) -> list[str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [stream.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [*pieces, stream.finish()]


def test_directory_equals_transformers(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(
                tokens, skip_special_tokens=skip
            )
    assert ours.eos_tokens == (theirs.eos_token_id,)
    assert ours.names["bos_token"] == "<s>"
    assert ours.vocabulary_size == len(theirs)
    assert ours.special_tokens >= set(theirs.all_special_ids)


def test_chat_equals_transformers(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = pair
    assert ours.template is not None
    for prompt in (True, False):
        rendered = ours.template.render(CHAT, add_generation_prompt=prompt)
        assert rendered == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(CHAT) == expected


def test_streams_say_what_decode_says(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    """Cut anywhere, the pieces add up, and no piece but the last ends in a broken character."""
    ours, _ = pair
    for text in TEXTS[:-1]:
        tokens = ours.encode(text)
        for size in (1, 2, 5):
            for skip in (True, False):
                pieces = streamed(ours, tokens, size, skip)
                assert "".join(pieces) == ours.decode(tokens, skip_special_tokens=skip)
                assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_is_held_until_it_is_whole() -> None:
    tokenizer = Tokenizer(train("bytes"), template=None, names={}, eos_tokens=())
    face = [tokenizer.token_of(character) for character in ("ð", "Ł", "ĺ", "Ģ")]
    stream = tokenizer.detokenizer()
    assert [stream.add([token]) for token in face if token is not None] == ["", "", "", "😀"]
    assert stream.add([face[0], face[1]]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.detokenizer().add([10**6]) == ""


def test_broken_bytes_stream_as_decode_has_them() -> None:
    """Bytes that form no character become replacement characters, the same ones as in `decode`."""
    tokenizer = Tokenizer(train("bytes"), template=None, names={}, eos_tokens=())
    numbers = [tokenizer.token_of(character) for character in ("ð", "Ł", "h", "Ģ", "ĺ", "é", "H", "ÿ", "ð")]
    tokens = [number for number in numbers if number is not None]
    assert len(tokens) == 9
    for size in (1, 2, 4, 9):
        assert "".join(streamed(tokenizer, tokens, size, True)) == tokenizer.decode(tokens)


def test_continuation_adds_only_what_is_new(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, _ = pair
    assert ours.template is not None
    whole = ours.template.render(CHAT)
    said = whole[: whole.index("Hello") + len("Hello")]
    for last, end in ((ours.eos_tokens[0], "<|im_end|>"), (ours.token_of("H"), ""), (None, "")):
        added = ours.encode_continuation(CHAT[3:], last_token=last)
        expected = ours.encode(whole[len(said) + len(end) :], add_special_tokens=False)
        assert added == expected


def test_several_named_templates_and_a_template_file(tmp_path: Path) -> None:
    train("bytes").save(str(tmp_path / "tokenizer.json"))
    write_llama_config(tmp_path, 400)
    shows_all = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {
        "chat_template": [
            {"name": "tool", "template": f"T {shows_all}"},
            {"name": "default", "template": f"D {shows_all}"},
        ]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_tokenizer(open_checkpoint(tmp_path))
    assert opened.template is not None
    assert opened.template.render(CHAT).startswith("D ")
    (tmp_path / "chat_template.jinja").write_text(f"F {shows_all}")
    opened = open_tokenizer(open_checkpoint(tmp_path))
    assert opened.template is not None
    assert opened.template.render(CHAT).startswith("F ")


def test_missing_parts_are_named(tmp_path: Path) -> None:
    write_llama_config(tmp_path, 400)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        open_tokenizer(open_checkpoint(tmp_path))
    bare = Tokenizer(train("bytes"), template=None, names={}, eos_tokens=())
    with pytest.raises(ChatTemplateError, match="no chat template"):
        bare.encode_chat(CHAT)


@pytest.mark.parametrize("source", ["{{ 'a' * 100000000 }}", "{{ 100000000 * [0] }}", "{{ 10 ** 100000 }}"])
def test_templates_cannot_fill_the_memory(source: str) -> None:
    """Refused before the product is made, not when it is rendered."""
    with pytest.raises(ChatTemplateError, match="too large"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ raise_exception('no system message') }}",
        "{{ messages[99].role.x.y }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_cannot_reach_out(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(CHAT)


def test_templates_have_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "OUTPUT_CHARACTERS_MAX", 1000)
    ChatTemplate("{% for i in range(100) %}0123456789{% endfor %}", {}).render([])
    with pytest.raises(ChatTemplateError, match="more than 1000"):
        ChatTemplate("{% for i in range(101) %}0123456789{% endfor %}", {}).render([])
    monkeypatch.setattr(chat_template, "TEMPLATE_CHARACTERS_MAX", 10)
    with pytest.raises(ChatTemplateError, match="longer than 10"):
        ChatTemplate("0123456789a", {})
    with pytest.raises(ChatTemplateError, match="compiled"):
        ChatTemplate("{% if %}", {})


def test_templates_have_what_they_expect() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ 3 * 4 }}{{ '-' * 3 }}{{ extra }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "<é>"}], extra="!"
    )
    assert rendered == '{"role": "user", "content": "<é>"}<s>412---!'


def test_a_template_is_compiled_once_and_keeps_nothing() -> None:
    source = (
        "{% set seen = namespace(count=0) %}{% for m in messages %}{% set seen.count = seen.count + 1 %}"
        "{{ bos_token }}{{ seen.count }}{{ m.content }}{% endfor %}"
    )
    first, second = ChatTemplate(source, {"bos_token": "a"}), ChatTemplate(source, {"bos_token": "b"})
    assert first._template is second._template
    messages = [{"role": "user", "content": "x"}]
    assert [each.render(messages) for each in (first, second, first)] == ["a1x", "b1x", "a1x"]


def gguf_metadata(**changes: object) -> Fields:
    encoder = train("bytes")
    vocabulary = sorted(encoder.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    merges = json.loads(encoder.to_str())["model"]["merges"]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 0,
    }
    return Fields({**values, **changes}, "test.gguf")  # type: ignore[dict-item]


def test_gguf_metadata_gives_the_same_tokenizer() -> None:
    original, built = train("bytes"), gguf_vocabulary.build_tokenizer(gguf_metadata())
    for text in TEXTS:
        assert built.encode(text).ids == original.encode(text).ids
    with_bos = gguf_vocabulary.build_tokenizer(gguf_metadata(**{"tokenizer.ggml.add_bos_token": True}))
    assert with_bos.encode("Hello").ids == [0, *original.encode("Hello").ids]
    assert with_bos.encode("Hello", add_special_tokens=False).ids == original.encode("Hello").ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 12345  x's", ["ab", " 12345", " ", " x", "'s"]),
        ("smollm", "ab 12345  x's", ["ab", " ", "1", "2", "3", "4", "5", " ", " x", "'s"]),
        ("gpt-4o", "HelloWorld's 1234 a/\n", ["Hello", "World's", " ", "123", "4", " a", "/\n"]),
        ("llama-bpe", "ab 12345  x'S\n\n!", ["ab", " ", "123", "45", " ", " x", "'S", "\n\n", "!"]),
        ("qwen2", "ab 123  x'S\n\n!", ["ab", " ", "1", "2", "3", " ", " x", "'S", "\n\n", "!"]),
    ],
)
def test_pre_tokenizers_cut_where_their_names_say(pre: str, text: str, pieces: list[str]) -> None:
    built = gguf_vocabulary.build_tokenizer(gguf_metadata(**{"tokenizer.ggml.pre": pre}))
    assert built.pre_tokenizer is not None
    cut = [text[start:end] for _, (start, end) in built.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def pieces_metadata(seed: int) -> dict[str, object]:
    """A vocabulary of scored pieces: bytes, letters, and random words over them."""
    chance = random.Random(seed)
    letters = [*"abcd", "▁"]
    words = {"".join(chance.choices(letters, k=chance.randint(2, 5))) for _ in range(120)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *letters, *sorted(words)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(score) for score in chance.sample(range(1000), len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def join_by_score(text: str, metadata: dict[str, object]) -> list[str]:
    """The definition: the pair that makes the best piece is joined first, the leftmost of equals."""
    tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    best = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}  # type: ignore[call-overload]
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (-best[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in best and left in best and right in best
        ]
        if not joins:
            break
        _, place = min(joins)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled = [[part] if part in best else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for group in spelled for token in group]


@pytest.mark.parametrize("seed", range(5))
def test_scored_pieces_join_best_first(seed: int) -> None:
    metadata = pieces_metadata(seed)
    tokenizer = Tokenizer(
        gguf_vocabulary.build_tokenizer(Fields(metadata, "test.gguf")),  # type: ignore[arg-type]
        template=None,
        names={},
        eos_tokens=(2,),
    )
    chance = random.Random(seed)
    for _ in range(60):
        text = "".join(chance.choices("abcd é😀", weights=[5, 5, 5, 5, 3, 1, 1], k=chance.randint(1, 30)))
        tokens = tokenizer.encode(text)
        names = [metadata["tokenizer.ggml.tokens"][token] for token in tokens]  # type: ignore[index]
        assert names == ["<s>", *join_by_score(text, metadata)]
        assert tokenizer.decode(tokens) == text
        assert "".join(streamed(tokenizer, tokens, 1, True)) == text


def test_unknown_gguf_tokenizers_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'tekken'.*smollm"):
        gguf_vocabulary.build_tokenizer(gguf_metadata(**{"tokenizer.ggml.pre": "tekken"}))
    with pytest.raises(ConfigurationError, match="one score per token"):
        gguf_vocabulary.build_tokenizer(gguf_metadata(**{"tokenizer.ggml.model": "llama"}))
    with pytest.raises(ConfigurationError, match="'t5'"):
        gguf_vocabulary.build_tokenizer(gguf_metadata(**{"tokenizer.ggml.model": "t5"}))


def test_detokenizers_are_independent(pair: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, _ = pair
    first, second = ours.detokenizer(), ours.detokenizer()
    tokens = ours.encode("Hello world")
    interleaved: Callable[[int], str] = lambda token: first.add([token]) + second.add([token])  # noqa: E731
    both = "".join(interleaved(token) for token in tokens) + first.finish() + second.finish()
    assert sorted(both) == sorted(2 * ours.decode(tokens))
