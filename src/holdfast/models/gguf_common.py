"""What GGUF files of several architectures share: keys, experts in one tensor, recurrent layers."""

from __future__ import annotations

import math

from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.gguf import Change, GgufFile, Stored, TensorEntry

__all__ = ["change_of", "common_values", "count_of_experts", "split_experts"]

_EXPERTS_MAX = 4096


def common_values(file: GgufFile, metadata: Fields, kind: str) -> dict[str, Json]:
    """Keys of config.json that every family reads."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigurationError(f"{file.path.name} has no token_embd.weight")
    eos = metadata.integers("tokenizer.ggml.eos_token_id") + metadata.integers("tokenizer.ggml.eot_token_id")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer(f"{kind}.embedding_length"),
        "num_hidden_layers": metadata.integer(f"{kind}.block_count"),
        "max_position_embeddings": metadata.integer(f"{kind}.context_length"),
        "rms_norm_eps": metadata.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.raw("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(eos)),
    }


def count_of_experts(metadata: Fields, kind: str) -> int:
    """The number of experts of a layer; 0 for a model without."""
    count = metadata.integer(f"{kind}.expert_count", 0, least=0)
    if count > _EXPERTS_MAX:
        raise ConfigurationError(f"{count} experts are not supported; at most {_EXPERTS_MAX} are")
    return count


def split_experts(name: str, entry: TensorEntry, count: int, at: str, part: str) -> dict[str, Stored]:
    """The matrices of single experts in a tensor of all; none where the tensor has another number of them."""
    if len(entry.shape) != 3 or entry.shape[0] != count:
        return {}
    return {f"{at}.{expert}.{part}.weight": Stored((name,), expert=expert) for expert in range(count)}


def change_of(part: str, entry: TensorEntry) -> Change:
    """How a file stores a tensor of a Mamba2 or gated delta layer: `-exp` of the log decay, other shapes."""
    if part in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return Change(negated_exponential=part == "ssm_a", shape=(math.prod(entry.shape),))
    if part == "ssm_conv1d.weight" and len(entry.shape) == 2:
        return Change(shape=(entry.shape[0], 1, entry.shape[1]))
    return Change()
