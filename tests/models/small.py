"""Small models as directories, complete: weights, configuration, tokenizer and chat template.

`write_small_model(directory, family)` writes what `save_pretrained` writes, in shards, plus a vocabulary of
its own, so that a directory can be given to an engine, to a server or to transformers. The models say words
and nothing else: the output rows of all other tokens are zero, which no word's best logit ever falls below.
What they say can be encoded again and gives the same tokens, so that a transcript as text and one as tokens
are the same.

Their weights are moderate: float32 rounding moves a logit by about a millionth of the largest, whatever else
is in the batch. So greedy tokens are those of the same conversation run alone wherever the two best logits
are further apart than `CLEAR_MARGIN`, which `least_margin` tells of a turn that was asked for two
log-probabilities. `tests/engine/test_batch_invariance.py` shows both. Used by tests of the engine and the
server.
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from holdfast.engine.engine import Turn

MARKS = ("<|end|>", "<|start|>", "<|pad|>")
END = 0
WORDS = tuple(f"{first}{middle}{last}" for first in "bdfgklmprt" for middle in "aeiou" for last in "klnrs")
FIRST_WORD = len(MARKS) + 256
VOCABULARY = FIRST_WORD + len(WORDS)

CLEAR_MARGIN = 1e-4
"""Distance of two logits that no order of sums bridges: they are of about ten, their noise of about 1e-5."""

HISTORY = {"llama": 1.5, "mistral": 1.5, "gemma3": 1.0, "bamba": 3.0, "mamba2": 4.0}
"""How much louder than drawn the mixers are, so that what is far back is heard in what is said next."""

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 2,
}
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
SMALL_FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 48}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {"num_hidden_layers": 3, "attn_layer_indices": [1], **_MAMBA},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "expand": 2},
    ),
}


def small_encoder() -> Encoder:
    """Bytes, so that anything can be encoded, and words: tokens with the space before them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        text: number for number, text in enumerate([*MARKS, *letters, *(f"Ġ{word}" for word in WORDS)])
    }
    made = Encoder(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


def build_small_model(family: str, *, seed: int = 1, ends: bool = False) -> transformers.PreTrainedModel:
    """The model of transformers that a directory is written from.

    With `ends` a turn may end by itself, about once in as many tokens as there are words; without it every
    turn goes on to its limit.
    """
    config, model, changes = SMALL_FAMILIES[family]
    torch.manual_seed(seed)
    built: transformers.PreTrainedModel = getattr(transformers, model)(
        getattr(transformers, config)(**{**_COMMON, **changes})
    )
    built.eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            elif "o_proj" in name or "out_proj" in name:
                parameter *= HISTORY[family]
            elif "A_log" in name:
                parameter -= 2.0
            elif "dt_bias" in name:
                parameter += 2.0
        embedding, head = built.get_input_embeddings().weight, built.get_output_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=generator) * 0.5)
        head.copy_(torch.randn(head.shape, generator=generator) * 0.3)
        head[:FIRST_WORD] = 0.0
        if ends:
            head[END] = torch.randn(head.shape[1], generator=generator) * 0.3
    return built


def write_small_model(
    directory: Path, family: str = "llama", *, seed: int = 1, ends: bool = False, shard: str = "100KB"
) -> Path:
    """A model directory with everything in it; answers the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    built = build_small_model(family, seed=seed, ends=ends)
    built.generation_config = transformers.GenerationConfig(eos_token_id=END, pad_token_id=2)
    built.save_pretrained(directory, max_shard_size=shard)
    small_encoder().save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKS[END],
        "pad_token": MARKS[2],
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def conversation(number: int, turns: int = 4, words: int = 9) -> list[str]:
    """What a user says, turn by turn: words by a number, of different lengths."""
    generator = torch.Generator().manual_seed(10_000 + number)
    said = []
    for _ in range(turns):
        count = int(torch.randint(1, 2 * words, (1,), generator=generator))
        chosen = torch.randint(len(WORDS), (count,), generator=generator).tolist()
        said.append(" ".join(WORDS[index] for index in chosen))
    return said


def least_margin(turn: Turn) -> float:
    """How far apart the two best logits were at the closest; the turn must have asked for two of them."""
    margins = [first[1] - second[1] for first, second in (each.top[:2] for each in turn.logprobs)]
    assert margins, "the turn did not ask for two log-probabilities"
    return min(margins)
