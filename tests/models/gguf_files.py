"""Small GGUF files for tests, written with the gguf package from models of transformers.

Every matrix is in one format, or some are in others; the weights that the file really holds (after
quantisation) are put back into the transformers model, so that it is the reference of what the file means.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedConfig, PreTrainedModel

from tests.models.k_quants import WRITERS, quantise_blocks

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
WHOLE_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in WHOLE_NAMES:
        return f"{WHOLE_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    theirs = "ffn_norm" if part == "post_attention_layernorm" else LAYER_NAMES[part]
    return f"blk.{layer}.{theirs}.{ending}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a half-split rotary projection in the order that llama files have."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def deinterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


_BLOCK_SCALES = {
    Kind.Q2_K: (80, 0.006, 82, 1.5),
    Kind.Q3_K: (108, 0.001, None, 0.0),
    Kind.Q4_K: (0, 0.0003, 2, 7.5),
    Kind.Q5_K: (0, 0.00015, 2, 15.5),
    Kind.Q6_K: (208, 0.00004, None, 0.0),
    Kind.IQ4_NL: (0, 0.0007, None, 0.0),
    Kind.IQ4_XS: (0, 0.00004, None, 0.0),
}
"""Where a block has its scale and what that is, where it has the scale of its minima and how much larger."""


def quantise(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of a matrix."""
    return quantise_blocks(weight, kind) if kind in WRITERS else gguf.quantize(weight, kind)


def random_blocks(outputs: int, inputs: int, kind: Kind, seed: int) -> np.ndarray:
    """Bytes of a random matrix: in K-quants and IQ4 all codes and all scales of groups."""
    random = np.random.default_rng(seed)
    if kind not in _BLOCK_SCALES:
        return gguf.quantize(random.standard_normal((outputs, inputs), dtype=np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    at, value, minimum_at, ratio = _BLOCK_SCALES[kind]
    scale = np.full((*blocks.shape[:2], 1), value, dtype=np.float16)
    blocks[..., at : at + 2] = scale.view(np.uint8)
    if minimum_at is not None:
        blocks[..., minimum_at : minimum_at + 2] = (scale * ratio).view(np.uint8)
    return blocks.reshape(outputs, -1)


def add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """The metadata that all families with attention have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = config.to_dict().get("head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: Kind,
    *,
    architecture: str = "llama",
    others: Mapping[str, Kind] = MappingProxyType({}),
) -> None:
    """Writes a model with all matrices in one format, and sets the model's weights to what was written.

    `others`: the formats of matrices whose names contain these words.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    state = model.state_dict()
    for name, tensor in state.items():
        if tied and name == "lm_head.weight":
            continue
        weight = tensor.detach().numpy()
        rotated = next((count for part, count in heads.items() if part in name), None)
        if architecture == "llama" and rotated is not None:
            weight = interleave(weight, rotated)
        if weight.ndim == 1 or kind is Kind.F32:
            writer.add_tensor(gguf_name(name), weight.astype(np.float32))
            continue
        used = next((each for part, each in others.items() if part in name), kind)
        raw = quantise(weight, used)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=used)
        meant = gguf.dequantize(raw, used)
        if architecture == "llama" and rotated is not None:
            meant = deinterleave(meant, rotated)
        tensor.copy_(torch.from_numpy(meant.astype(np.float32)))
    if tied:
        model.tie_weights()
    finish(writer)
