"""Small random models of the shapes that are published quantised, and a prompt for them."""

import torch
import transformers
from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "initializer_range": 0.2,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
}


def build(name: str) -> PreTrainedModel:
    kind, changes = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    return model


def prompt() -> list[int]:
    return torch.randint(SIZES["vocab_size"], (21,), generator=torch.Generator().manual_seed(3)).tolist()
