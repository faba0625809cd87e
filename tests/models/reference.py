"""Small random models of transformers' own classes, and what they answer: the reference of the parity tests.

Weights are drawn wide (`initializer_range` of 0.2 and more) and vectors are moved off their neutral values,
so that norms, biases and decays matter and a wrong layer shows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.weights import Placement
from tests.models.paged import generate

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


_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}


# The delta rule's output is normed head by head: where a head says next to nothing, the norm turns rounding
# into signal, and float32 is 4e-4 off float64 in transformers itself. With a larger epsilon it is 2e-5.
_CALM = {"initializer_range": 0.2, "rms_norm_eps": 1e-2}


@dataclass(frozen=True)
class Variant:
    """One model to compare: a configuration class and its arguments."""

    config: Callable[..., PreTrainedConfig]
    model: str
    arguments: dict[str, object]
    seed: int = 1
    scale: tuple[tuple[str, float], ...] = ()
    """Factors on parameters by a part of their names, where a plain random model repeats itself."""
    dtype: torch.dtype = torch.float32
    """The type that the checkpoint has the weights in; they are computed in float32."""

    def build(self) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        config = self.config(**self.arguments)
        model = getattr(transformers, self.model)(config).eval().float()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in (*model.parameters(), *_saved_buffers(model)):
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            for part, factor in self.scale:
                for name, parameter in model.named_parameters():
                    if part in name:
                        parameter *= factor
            for parameter in model.parameters():
                parameter.copy_(parameter.to(self.dtype))
        return model

    def save(self, model: PreTrainedModel, path: Path) -> None:
        """Write a checkpoint of several files."""
        stored = None
        if self.dtype is not torch.float32:
            stored = {name: tensor.to(self.dtype) for name, tensor in model.state_dict().items()}
        model.save_pretrained(path, state_dict=stored, max_shard_size="60KB")


def _saved_buffers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Buffers that belong to the checkpoint, such as the corrections of a router."""
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def _variant(
    name: str, model: str, *, seed: int = 1, scale: tuple[tuple[str, float], ...] = (), **changes: object
) -> Variant:
    return Variant(getattr(transformers, name), model, {**_COMMON, **changes}, seed, scale)


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
    "qwen3-tied-biased": _variant(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        head_dim=10,
        num_attention_heads=7,
        num_key_value_heads=7,
        attention_bias=True,
        tie_word_embeddings=True,
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
    "qwen3-moe": _variant(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-normalised": _variant(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "gemma3": _variant(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        seed=4,
        scale=(("embed_tokens", 0.03),),
        head_dim=16,
        sliding_window=21,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
    "gemma3-softcap": _variant(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        head_dim=10,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=9,
        query_pre_attn_scalar=24,
        num_hidden_layers=7,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gpt-oss": _variant(
        "GptOssConfig",
        "GptOssForCausalLM",
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=17,
        num_hidden_layers=4,
    ),
    "gpt-oss-odd": _variant(
        "GptOssConfig",
        "GptOssForCausalLM",
        initializer_range=0.2,
        head_dim=12,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_local_experts=7,
        num_experts_per_tok=3,
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "olmo3": _variant("Olmo3Config", "Olmo3ForCausalLM", sliding_window=15, num_hidden_layers=4),
    "olmo3-yarn": _variant(
        "Olmo3Config",
        "Olmo3ForCausalLM",
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=33,
        num_key_value_heads=3,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 800.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 800.0},
        },
    ),
    "mamba2": _variant(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        num_heads=6,
        head_dim=16,
        state_size=8,
        n_groups=2,
        expand=2,
        chunk_size=16,
    ),
    "mamba2-odd": _variant(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        scale=(("out_proj.weight", 3.0),),
        num_heads=3,
        head_dim=32,
        state_size=5,
        n_groups=1,
        expand=2,
        conv_kernel=3,
        chunk_size=8,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "granite-hybrid": _variant(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        intermediate_size=24,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.6,
        **_MAMBA,
    ),
    "granite-hybrid-dense": _variant(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        num_local_experts=0,
        shared_intermediate_size=60,
        layer_types=["attention", "mamba", "mamba"],
        attention_multiplier=0.25,
        position_embedding_type="rope",
        tie_word_embeddings=True,
        **_MAMBA,
    ),
    "falcon-h1": _variant(
        "FalconH1Config", "FalconH1ForCausalLM", **{**_MAMBA, "mamba_d_head": 12}, mamba_d_ssm=72
    ),
    "falcon-h1-multiplied": _variant(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        **_MAMBA,
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        embedding_multiplier=2.5,
        lm_head_multiplier=0.7,
        mlp_multipliers=[0.8, 1.3],
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.9,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.8,
    ),
    "nemotron-h": _variant(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        # transformers applies the lower bound of the time step to prompts but not to single steps.
        time_step_min=1e-6,
        scale=(("up_proj", 0.1),),
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        routed_scaling_factor=1.5,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        head_dim=8,
        chunk_size=16,
        num_hidden_layers=None,
    ),
    "nemotron-h-groups": _variant(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        # transformers applies the lower bound of the time step to prompts but not to single steps.
        time_step_min=1e-6,
        seed=4,
        scale=(("up_proj", 0.3), ("out_proj", 10.0), ("o_proj", 10.0)),
        layers_block_type=["moe", "full_attention", "linear_attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        moe_intermediate_size=20,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=30,
        mamba_num_heads=4,
        mamba_head_dim=12,
        ssm_state_size=8,
        n_groups=4,
        head_dim=16,
        chunk_size=16,
        use_bias=True,
        mlp_bias=True,
        num_hidden_layers=None,
    ),
    "qwen3-next": _variant(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        **_CALM,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        **_DELTA,
    ),
    "qwen3-next-dense": _variant(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        seed=3,
        **_CALM,
        head_dim=24,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_experts=0,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        tie_word_embeddings=True,
        **{**_DELTA, "linear_num_value_heads": 2},
    ),
    "qwen3.5": _variant(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        **_CALM,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **_DELTA,
    ),
    "qwen3.5-tied-biased": _variant(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        **_CALM,
        head_dim=8,
        num_attention_heads=5,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_conv_kernel_dim=3,
        **{**_DELTA, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ),
    "llama-bf16": replace(_variant("LlamaConfig", "LlamaForCausalLM", hidden_size=96), dtype=torch.bfloat16),
}


@contextmanager
def in_double() -> Iterator[None]:
    """Makes what the models of transformers compute in float32, whatever their weights, float64 instead."""
    single, widen = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32 = torch.float = single  # type: ignore[misc]
        torch.Tensor.float = widen  # type: ignore[method-assign]


def double_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The logits of every position, computed in float64 throughout; changes the model."""
    model = model.double()
    model.set_experts_implementation("eager")  # the grouped product has no float64 form
    with in_double(), torch.inference_mode():
        answer: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert answer.dtype == torch.float64
    return answer


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


def make_reference(
    variant: Variant, path: Path, draft: Callable[[Path], list[list[int]]] | None = None
) -> Reference:
    """Saves the model in shards and asks transformers for tokens and logits.

    Asking for one token at a time takes long, so `draft`, by default our model, guesses the tokens. A guess
    counts if the logits of transformers make each of its tokens the most likely one, which is what greedy
    decoding takes; otherwise transformers is asked token by token.
    """
    model = variant.build()
    variant.save(model, path)
    generated, logits = [], []
    for prompt, guess in zip(prompts(), (draft or drafts)(path), strict=True):
        tokens, answer = guess, _logits(model, prompt + guess[:-1])
        if answer[len(prompt) - 1 :].argmax(dim=-1).tolist() != guess:
            tokens = _greedy(model, prompt)
            answer = _logits(model, prompt + tokens[:-1])
        generated.append(tokens)
        logits.append(answer)
    return Reference(path, prompts(), generated, logits)


def drafts(path: Path) -> list[list[int]]:
    """What our model says to the prompts."""
    placement = Placement(torch.device("cpu"), torch.float32, quantised=True)
    model = load_model(open_checkpoint(path), placement)
    return generate(model, prompts(), page_size=16, chunk=64, count=GENERATED)[1]


def _logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        answer: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return answer


def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=GENERATED,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = output[0].tolist()
    return tokens[len(prompt) :]
