"""Small random models of transformers' own classes, and what they answer: the reference of the parity tests.

Weights are drawn wide (`initializer_range` of 0.2 and more) and vectors are moved off their neutral values,
so that norms, biases and decays matter and a wrong layer shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 499
GENERATED = 64
PROMPT_LENGTHS = (70, 1, 37)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Variant:
    """One model to compare: a configuration class and its arguments."""

    config: Callable[..., PreTrainedConfig]
    model: str
    arguments: dict[str, object]

    def build(self) -> PreTrainedModel:
        torch.manual_seed(1)
        config = self.config(**self.arguments)
        model = getattr(transformers, self.model)(config).eval().float()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model


def _variant(name: str, model: str, **changes: object) -> Variant:
    return Variant(getattr(transformers, name), model, {**_COMMON, **changes})


VARIANTS: dict[str, Variant] = {
    "llama": _variant("LlamaConfig", "LlamaForCausalLM"),
    "llama-tied-biased": _variant(
        "LlamaConfig",
        "LlamaForCausalLM",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=6,
        head_dim=10,
        hidden_size=60,
    ),
    "llama3-rope": _variant(
        "LlamaConfig",
        "LlamaForCausalLM",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": _variant(
        "LlamaConfig",
        "LlamaForCausalLM",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2": _variant("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-window": _variant(
        "Qwen2Config", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=19, max_window_layers=1
    ),
    "qwen3": _variant(
        "Qwen3Config", "Qwen3ForCausalLM", head_dim=16, num_attention_heads=5, num_key_value_heads=1
    ),
    "mistral": _variant("MistralConfig", "MistralForCausalLM", sliding_window=23, head_dim=12),
    "mistral-full": _variant("MistralConfig", "MistralForCausalLM", sliding_window=None),
    "bamba": _variant(
        "BambaConfig", "BambaForCausalLM", attn_layer_indices=[1], num_hidden_layers=4, **_MAMBA
    ),
    "bamba-odd": _variant(
        "BambaConfig",
        "BambaForCausalLM",
        attn_layer_indices=[0, 2],
        tie_word_embeddings=True,
        **{**_MAMBA, "mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_conv": 3},
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
    ),
}


@dataclass(frozen=True)
class Reference:
    """A saved model, the prompts, and for each prompt the greedy tokens and the logits of every position."""

    path: Path
    prompts: list[list[int]]
    generated: list[list[int]]
    logits: list[torch.Tensor]


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def make_reference(variant: Variant, path: Path) -> Reference:
    """Saves the model in shards and asks transformers for tokens and logits."""
    model = variant.build()
    model.save_pretrained(path, max_shard_size="60KB")
    generated, logits = [], []
    with torch.inference_mode():
        for prompt in prompts():
            inputs = torch.tensor([prompt])
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=GENERATED,
                do_sample=False,
                pad_token_id=0,
            )
            tokens = output[0].tolist()
            generated.append(tokens[len(prompt) :])
            logits.append(model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0])
    return Reference(path, prompts(), generated, logits)
