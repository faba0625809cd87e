"""A tiny model with dummy weights and a byte-level vocabulary of its own, as a directory and as an engine.

The first tokens of the vocabulary are marks, then come the 256 bytes, then words; so any text can be encoded,
characters of several bytes span several tokens, and a model directory can be given to the command.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from holdfast.engine.engine import Engine
from holdfast.engine.listeners import SessionObserver
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.startup import open_loop
from holdfast.engine.text.tokenizer import Tokenizer

MARKS = ("<|end|>", "<|start|>", "<|pad|>")
END = 0
BYTE_FIRST = len(MARKS)
WORDS = ("the", "river", "runs", "cold", "and", "deep", "under", "old", "stones", "today")
VOCABULARY = BYTE_FIRST + 256 + len(WORDS)

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": END,
}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "llama": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "bamba": {
        **_COMMON,
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
}
# Families whose memory has a sliding window, for the tests of what happens to memory.
WINDOWED: dict[str, dict[str, object]] = {
    "mistral": {
        **_COMMON,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 24,
    },
    "olmo3": {
        **_COMMON,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SIZES = {"kv_tokens": 4096, "window_tokens": 4096, "state_slots": 64, "max_running": 16, "audit": "strict"}


def encoder() -> Encoder:
    """Bytes and a few words, without merges that join them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{word}" for word in WORDS]
    vocabulary = {text: number for number, text in enumerate([*MARKS, *letters, *words])}
    made = Encoder(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


def tokenizer() -> Tokenizer:
    """The same vocabulary without files."""
    return Tokenizer(encoder(), template=TEMPLATE, names={"eos_token": MARKS[END]}, eos_tokens=(END,))


def word(text: str) -> int:
    """The token of a word of the vocabulary, with the space before it."""
    return BYTE_FIRST + 256 + WORDS.index(text)


def byte_tokens(text: str) -> list[int]:
    """A text byte by byte."""
    tokens = tokenizer()
    return [
        next(n for n in range(BYTE_FIRST, BYTE_FIRST + 256) if tokens.token_bytes(n) == bytes([byte]))
        for byte in text.encode()
    ]


def write_model(directory: Path, family: str = "llama", **fields: object) -> Path:
    """A model directory without weights, to be loaded with dummy ones; `fields` replace some of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps((CONFIGURATIONS | WINDOWED)[family] | fields))
    encoder().save(str(directory / "tokenizer.json"))
    described = {"eos_token": MARKS[END], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def tiny_engine(directory: Path, observer: SessionObserver | None = None, **options: object) -> Engine:
    """An engine of a directory that `write_model` wrote."""
    chosen = make_options(**{"load_format": "dummy", **SIZES, **options})
    return Engine(open_loop(str(directory), chosen, observer=observer))


def greedy(count: int, **more: object) -> Sampling:
    """The most likely token, `count` times."""
    return Sampling(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **more})  # type: ignore[arg-type]
