"""Engines with draft heads: tiny checkpoints in the published formats, complete with weights.

`write_qwen` writes Qwen3-Next or Qwen3.5 with a multi-token-prediction head, `write_llama` a Llama, and
`write_eagle3` an EAGLE-3 head for any model of that width. Names and shapes are those of the published
checkpoints; weights are random. With `markov` a model's next token depends on its last one alone, and so does
a head's: they agree always.
"""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.core.turn import Turn
from holdfast.engine.draft.gain import Costs
from holdfast.engine.draft.head_proposer import HeadProposer
from holdfast.engine.draft.hidden import HeadCache
from holdfast.engine.draft.passes import Asked
from holdfast.engine.engine import Engine
from tests.engine.drafting import FREE_OF_COST
from tests.engine.tiny import CONFIGURATIONS, VOCABULARY, tiny_engine, write_model

WIDTH, HEADS, KV_HEADS, HEAD, MLP, EXPERTS = 32, 4, 2, 16, 48, 4
EAGLE_WORDS = 96
"""Tokens of an EAGLE-3 head's own vocabulary."""

_DELTA: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": HEAD,
    "intermediate_size": MLP,
}
_QWEN: dict[str, dict[str, object]] = {
    "next": {
        **_DELTA,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "dense": {
        **_DELTA,
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
}
Shapes = dict[str, tuple[int, ...]]


def _attention(at: str, inputs: int = WIDTH, *, gated: bool = True, normed: bool = True) -> Shapes:
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    norms: Shapes = {f"{at}q_norm": (HEAD,), f"{at}k_norm": (HEAD,)} if normed else {}
    return norms | {
        f"{at}q_proj": (2 * queries if gated else queries, inputs),
        f"{at}k_proj": (keys, inputs),
        f"{at}v_proj": (keys, inputs),
        f"{at}o_proj": (WIDTH, queries),
    }


def _mlp(at: str, size: int = MLP) -> Shapes:
    return {f"{at}gate_proj": (size, WIDTH), f"{at}up_proj": (size, WIDTH), f"{at}down_proj": (WIDTH, size)}


def _qwen_mlp(at: str, kind: str) -> Shapes:
    if kind == "dense":
        return _mlp(at)
    shapes: Shapes = {f"{at}gate": (EXPERTS, WIDTH), f"{at}shared_expert_gate": (1, WIDTH)}
    for expert in range(EXPERTS):
        shapes |= _mlp(f"{at}experts.{expert}.", 24)
    return shapes | _mlp(f"{at}shared_expert.", 24)


def _delta(at: str, kind: str) -> Shapes:
    keys, values = 16, 32
    inputs: Shapes = (
        {f"{at}in_proj_qkvz": (2 * keys + 2 * values, WIDTH), f"{at}in_proj_ba": (8, WIDTH)}
        if kind == "next"
        else {
            f"{at}in_proj_qkv": (2 * keys + values, WIDTH),
            f"{at}in_proj_z": (values, WIDTH),
            f"{at}in_proj_b": (4, WIDTH),
            f"{at}in_proj_a": (4, WIDTH),
        }
    )
    return inputs | {
        f"{at}conv1d": (2 * keys + values, 1, 4),
        f"{at}norm": (8,),
        f"{at}out_proj": (WIDTH, values),
        f"{at}A_log": (4,),
        f"{at}dt_bias": (4,),
    }


def _qwen(kind: str) -> Shapes:
    shapes: Shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    shapes |= {"model.norm": (WIDTH,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= _delta(f"{at}linear_attn.", kind) if layer == 0 else _attention(f"{at}self_attn.")
        shapes |= _qwen_mlp(f"{at}mlp.", kind)
        shapes |= {f"{at}input_layernorm": (WIDTH,), f"{at}post_attention_layernorm": (WIDTH,)}
    at = "mtp.layers.0."
    shapes |= {"mtp.fc": (WIDTH, 2 * WIDTH), "mtp.norm": (WIDTH,)}
    shapes |= {"mtp.pre_fc_norm_embedding": (WIDTH,), "mtp.pre_fc_norm_hidden": (WIDTH,)}
    shapes |= {f"{at}input_layernorm": (WIDTH,), f"{at}post_attention_layernorm": (WIDTH,)}
    return shapes | _attention(f"{at}self_attn.") | _qwen_mlp(f"{at}mlp.", kind)


def _eagle3(at: str) -> Shapes:
    shapes = _attention(f"{at}self_attn.", 2 * WIDTH, gated=False, normed=False) | _mlp(f"{at}mlp.")
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{at}{name}"] = (WIDTH,)
    return shapes | {"fc": (WIDTH, 3 * WIDTH), "norm": (WIDTH,), "lm_head": (EAGLE_WORDS, WIDTH)}


_WHOLE_NAMES = ("A_log", "dt_bias")


def _random(shapes: Shapes, seed: int, *, norms: float) -> dict[str, Tensor]:
    """Random weights; those of norms lie around `norms`."""
    dice = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        whole = name if name.endswith(_WHOLE_NAMES) else f"{name}.weight"
        drawn = torch.randn(shape, generator=dice)
        weights[whole] = norms + 0.1 * drawn if len(shape) == 1 else drawn * (1.5 / shape[-1] ** 0.5)
        if "embed_tokens" in name or "lm_head" in name:
            weights[whole] = drawn
    return weights


def _silence(weights: dict[str, Tensor]) -> None:
    """Let layers add nothing to the residual stream."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weight.zero_()


def write_qwen(directory: Path, kind: str = "next", *, markov: bool = False) -> Path:
    """Qwen3-Next (`next`) or Qwen3.5 (`dense`), of a layer of each kind, with its head."""
    CONFIGURATIONS.setdefault("qwen", CONFIGURATIONS["llama"])
    write_model(directory, "qwen", **_QWEN[kind], num_hidden_layers=2, rms_norm_eps=1e-6)
    weights = _random(_qwen(kind), 3, norms=0.0)
    weights = {
        name: weight + 1.0 if name.endswith("linear_attn.norm.weight") else weight
        for name, weight in weights.items()
    }
    if markov:
        _silence(weights)
        weights["mtp.fc.weight"] = torch.cat((torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)), dim=1)
        weights["mtp.pre_fc_norm_embedding.weight"].zero_()
        weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, directory / "model.safetensors")
    return directory


def write_llama(directory: Path, *, layers: int = 2, markov: bool = False) -> Path:
    """A Llama with weights."""
    write_model(directory, "llama", num_hidden_layers=layers, head_dim=HEAD, intermediate_size=MLP)
    shapes: Shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    shapes["model.norm"] = (WIDTH,)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= _attention(f"{at}self_attn.", gated=False, normed=False) | _mlp(f"{at}mlp.")
        shapes |= {f"{at}input_layernorm": (WIDTH,), f"{at}post_attention_layernorm": (WIDTH,)}
    weights = _random(shapes, 4, norms=1.0)
    if markov:
        _silence(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


def write_eagle3(directory: Path, *, form: str = "eagle", like: Path | None = None, **fields: object) -> Path:
    """An EAGLE-3 head in the form of EAGLE and SGLang, or of `speculators`, which has its own embedding.

    `like`: it agrees with this model, a Markov chain, and its vocabulary is the model's. Only in the form of
    `speculators`, whose residual stream is normed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    layer: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
    }
    own: dict[str, object] = {"draft_vocab_size": EAGLE_WORDS, "norm_before_residual": False}
    if form == "eagle":
        inner = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True}
        written = {**layer, **own, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": inner}
    else:
        own |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        kinds = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        written = {**own, **kinds, "transformer_layer_config": layer}
    at = "midlayer." if form == "eagle" else "layers.0."
    weights = _random(_eagle3(at), 5, norms=1.0)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(6))[:EAGLE_WORDS].sort().values
    weights["d2t"] = ids - torch.arange(EAGLE_WORDS)
    weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    if form != "eagle":
        dice = torch.Generator().manual_seed(7)
        weights["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH, generator=dice)
    if like is not None:
        _agree(weights, load_file(like / "model.safetensors"), at)
        written["draft_vocab_size"] = VOCABULARY
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(written | fields))
    return directory


def _agree(weights: dict[str, Tensor], model: Mapping[str, Tensor], at: str) -> None:
    """Let a head say what a Markov chain says: its layer turns the token's embedding into the hidden state.

    Queries and keys are the embedding, so large that a place attends to its own token alone; values are the
    embedding, which one head of each group brings to the output. The hidden states that come in are ignored.
    """
    for name in ("d2t", "t2d"):
        del weights[name]
    _silence(weights)
    attention = f"{at}self_attn."
    through = torch.zeros(WIDTH, HEADS * HEAD)
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        rows, inputs = slice(head * HEAD, head * HEAD + HEAD), slice(group * HEAD, group * HEAD + HEAD)
        weights[f"{attention}q_proj.weight"][rows] = 0.0
        weights[f"{attention}q_proj.weight"][rows, inputs] = 30.0 * torch.eye(HEAD)
        if head * KV_HEADS % HEADS == 0:
            through[inputs, rows] = torch.eye(HEAD)
    ahead = torch.cat((torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)), dim=1)
    weights[f"{attention}k_proj.weight"] = 30.0 * ahead
    weights[f"{attention}v_proj.weight"] = ahead.clone()
    weights[f"{attention}o_proj.weight"] = through
    weights[f"{at}hidden_norm.weight"].zero_()
    weights[f"{at}input_layernorm.weight"].fill_(1.0)
    weights["norm.weight"] = model["model.norm.weight"].clone()
    weights["embed_tokens.weight"] = model["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = model["lm_head.weight"].clone()


def head_engine(target: Path, *, costs: Costs = FREE_OF_COST, **options: object) -> Engine:
    """An engine with a head."""
    engine = tiny_engine(target, **{"load_format": "auto", "draft_tokens": 4096, **options})
    head_of(engine).costs = costs
    return engine


def mtp_engine(target: Path, **options: object) -> Engine:
    """An engine with the head of its checkpoint."""
    return head_engine(target, speculate="mtp", **options)


def head_of(engine: Engine) -> HeadProposer:
    """The head's proposer."""
    assert isinstance(engine.loop.drafts, HeadProposer)
    return engine.loop.drafts


def cache_of(engine: Engine) -> HeadCache:
    """The head's cache."""
    return head_of(engine).cache


Answers = Callable[[Turn], list[int]]


def plant(engine: Engine, answers: Answers, agreement: float, seed: int = 1) -> None:
    """Let the head draft what will be said, each token wrong with a probability.

    `answers` gives the whole answer of a turn. The head is fed as ever.
    """
    proposer, dice = head_of(engine), random.Random(seed)
    run = type(proposer.passes).run

    def planted(self: object, asked: list[Asked]) -> list[list[int]]:
        made = run(proposer.passes, asked)
        found: list[list[int]] = []
        for each, drafts in zip(asked, made, strict=True):
            said = answers(each.turn)[each.turn.generated :][: len(drafts)] if drafts else []
            found.append([token if dice.random() < agreement else (token + 1) % VOCABULARY for token in said])
        return found

    class Planted(type(proposer.passes)):  # type: ignore[misc]
        """Passes whose drafts are replaced."""

        __slots__ = ()
        run = planted

    proposer.passes.__class__ = Planted
