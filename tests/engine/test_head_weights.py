"""What heads compute from published weights, beside plain torch; and checkpoints that cannot be used.

The references read the same files by their published names, and compute whole sequences without a cache.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.core.plan import Row
from holdfast.core.turn import Turn
from holdfast.engine.draft import head_passes
from holdfast.engine.draft.head_passes import HeadPasses
from holdfast.engine.draft.hidden import HiddenStates
from holdfast.engine.draft.passes import Asked
from holdfast.engine.engine import Engine
from holdfast.engine.options import OptionError, make_options
from tests.engine.drafting import PROMPT
from tests.engine.heads import (
    EAGLE_WORDS,
    EXPERTS,
    HEAD,
    HEADS,
    KV_HEADS,
    head_engine,
    head_of,
    mtp_engine,
    write_eagle3,
    write_llama,
    write_qwen,
)
from tests.engine.tiny import VOCABULARY, greedy, tiny_engine, write_model

Weights = dict[str, Tensor]
Pass = Callable[[list[int], Tensor, list[int]], tuple[Tensor, Tensor]]
"""Tokens, hidden states and positions of places to the logits of the last one, and all new hidden states."""


def norm(x: Tensor, weight: Tensor, offset: float = 0.0, epsilon: float = 1e-5) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (weight + offset)


def rotated(x: Tensor, positions: list[int], size: int, theta: float = 10_000.0) -> Tensor:
    """Rotary embedding of the first `size` numbers of each head, halves as pairs; x [tokens, heads, head]."""
    half = size // 2
    angles = torch.tensor(positions)[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other, rest = x[..., :half], x[..., half:size], x[..., size:]
    return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), dim=-1)


def attention(weights: Weights, at: str, x: Tensor, positions: list[int], *, qwen: bool) -> Tensor:
    """Causal attention; Qwen's has normed heads, of which a quarter is rotated, and an output gate."""
    count = len(positions)
    query = x @ weights[f"{at}q_proj.weight"].T
    query, gate = query.view(count, HEADS, -1).split(HEAD, dim=-1) if qwen else (query, None)
    query = query.reshape(count, HEADS, HEAD)
    key = (x @ weights[f"{at}k_proj.weight"].T).view(count, KV_HEADS, HEAD)
    value = (x @ weights[f"{at}v_proj.weight"].T).view(count, KV_HEADS, HEAD)
    if qwen:
        query = norm(query, weights[f"{at}q_norm.weight"], 1.0, 1e-6)
        key = norm(key, weights[f"{at}k_norm.weight"], 1.0, 1e-6)
    size = HEAD // 4 if qwen else HEAD
    query, key = rotated(query, positions, size), rotated(key, positions, size)
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    if gate is not None:
        mixed = mixed * gate.sigmoid()
    return mixed.reshape(count, -1) @ weights[f"{at}o_proj.weight"].T


def mlp(weights: Weights, at: str, x: Tensor) -> Tensor:
    gate, up = x @ weights[f"{at}gate_proj.weight"].T, x @ weights[f"{at}up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ weights[f"{at}down_proj.weight"].T


def experts(weights: Weights, at: str, x: Tensor) -> Tensor:
    """The two best experts of each token, and the gated shared one."""
    chances = (x @ weights[f"{at}gate.weight"].T).softmax(-1)
    best, ids = chances.topk(2, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    shares = torch.zeros(len(x), EXPERTS).scatter_(1, ids, best)
    out = sum(shares[:, e : e + 1] * mlp(weights, f"{at}experts.{e}.", x) for e in range(EXPERTS))
    gate = (x @ weights[f"{at}shared_expert_gate.weight"].T).sigmoid()
    return out + gate * mlp(weights, f"{at}shared_expert.", x)


def mtp(weights: Weights, kind: str) -> Pass:
    def run(tokens: list[int], hidden: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        def normed(x: Tensor, name: str) -> Tensor:
            return norm(x, weights[f"mtp.{name}.weight"], 1.0, 1e-6)

        embedded = weights["model.embed_tokens.weight"][tokens]
        joined = torch.cat(
            (normed(embedded, "pre_fc_norm_embedding"), normed(hidden, "pre_fc_norm_hidden")), dim=-1
        )
        x = joined @ weights["mtp.fc.weight"].T
        at = "mtp.layers.0."
        x = x + attention(
            weights, f"{at}self_attn.", normed(x, "layers.0.input_layernorm"), positions, qwen=True
        )
        inner = normed(x, "layers.0.post_attention_layernorm")
        x = x + (mlp if kind == "dense" else experts)(weights, f"{at}mlp.", inner)
        out = normed(x, "norm")
        return out[-1] @ weights["lm_head.weight"].T, out

    return run


def eagle3(weights: Weights, model: Weights, form: str) -> Pass:
    at = "midlayer." if form == "eagle" else "layers.0."
    ids = torch.arange(EAGLE_WORDS) + weights["d2t"]
    embedding = weights.get("embed_tokens.weight", model["model.embed_tokens.weight"])

    def run(tokens: list[int], hidden: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        embedded = norm(embedding[tokens], weights[f"{at}input_layernorm.weight"])
        inner = norm(hidden, weights[f"{at}hidden_norm.weight"])
        x = hidden if form == "eagle" else inner
        joined = torch.cat((embedded, inner), dim=-1)
        x = x + attention(weights, f"{at}self_attn.", joined, positions, qwen=False)
        x = x + mlp(weights, f"{at}mlp.", norm(x, weights[f"{at}post_attention_layernorm.weight"]))
        logits = torch.full((VOCABULARY,), -1e4)
        logits[ids] = norm(x[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
        return logits, x

    return run


def streams(model: Weights, tokens: list[int]) -> list[Tensor]:
    """The residual stream of a Llama of two layers, before, between and after them."""
    x, positions = model["model.embed_tokens.weight"][tokens], list(range(len(tokens)))
    found = [x]
    for layer in range(2):
        at = f"model.layers.{layer}."
        inner = norm(x, model[f"{at}input_layernorm.weight"])
        x = x + attention(model, f"{at}self_attn.", inner, positions, qwen=False)
        x = x + mlp(model, f"{at}mlp.", norm(x, model[f"{at}post_attention_layernorm.weight"]))
        found.append(x)
    return found


class Round(NamedTuple):
    """One round of drafts of a session: the position of the place they begin at, and what was said."""

    session: str
    base: int
    last: int
    logits: list[Tensor]
    drafts: list[int]


class Recorder:
    """What a head was given and what it said: hidden states by position, and the logits of each draft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.seen: dict[str, dict[int, Tensor]] = {}
        self.rounds: list[Round] = []
        head = head_of(engine).passes.model
        note, run, logits = HiddenStates.note, HeadPasses.run, head.logits
        said: list[Tensor] = []

        def noting(
            states: HiddenStates, rows: list[Row[Turn]], features: tuple[Tensor, ...], *, reused: bool
        ) -> None:
            first = 0
            for row in rows:
                own = self.seen.setdefault(row.turn.session_id, {})
                for place in range(row.count):
                    own[row.start + place] = torch.cat([each[first + place] for each in features])
                first += row.count
            note(states, rows, features, reused=reused)

        def running(passes: HeadPasses, asked: list[Asked]) -> list[list[int]]:
            said.clear()
            last = [len(each.entry.tokens) + len(each.tokens) - 2 for each in asked]
            made = run(passes, asked)
            if len(asked) == 1 and asked[0].drafts:
                one = asked[0]
                self.rounds.append(Round(one.turn.session_id, one.entry.base, last[0], list(said), made[0]))
            return made

        def saying(hidden: Tensor, out: Tensor | None = None) -> Tensor:
            found = logits(hidden, out)
            said.append(found[0].clone())
            return found

        monkeypatch.setattr(HiddenStates, "note", noting)
        monkeypatch.setattr(HeadPasses, "run", running)
        monkeypatch.setattr(head, "logits", saying)


def compare(record: Recorder, each: Round, tokens: list[int], head: Pass, join: Tensor | None) -> None:
    """One round of drafts beside the reference; `join` projects what the model gives."""
    places = list(range(each.base, each.last + 1))
    given = torch.stack([record.seen[each.session][place] for place in places])
    hidden = given if join is None else given @ join.T
    following = [tokens[place + 1] for place in places]
    for logits, draft in zip(each.logits, each.drafts, strict=True):
        expected, new = head(following, hidden, places)
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
        assert draft == int(logits.argmax())
        following, places = [*following, draft], [*places, places[-1] + 1]
        hidden = torch.cat((hidden, new[-1:]))


def play(engine: Engine) -> dict[str, list[int]]:
    """A session of two turns and a fork of it: all of their tokens, by session."""
    session = engine.session()
    found: dict[str, list[int]] = {}
    session.say(PROMPT[:20], greedy(6)).wait()
    session.say([7, 8], greedy(6)).wait()
    child = session.fork()
    child.say([9, 10], greedy(6)).wait()
    for each in (session, child):
        found[each.id] = list(engine.loop.scheduler.registry.sessions[each.id].sequence.tokens.slice(0, 100))
    return found


@pytest.mark.parametrize("kind", ["next", "dense"])
def test_prediction_heads_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write_qwen(tmp_path, kind)
    engine = mtp_engine(path)
    record = Recorder(monkeypatch, engine)
    tokens, weights = play(engine), load_file(path / "model.safetensors")
    assert len(record.rounds) >= 12 and {each.base > 0 for each in record.rounds} == {False, True}
    for each in record.rounds:
        compare(record, each, tokens[each.session], mtp(weights, kind), None)
    first = next(iter(record.seen.values()))
    said = weights["lm_head.weight"] @ first[19]
    assert int(said.argmax()) == tokens[next(iter(record.seen))][20], "it is given the normed hidden state"


@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_eagle3_heads_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = write_llama(tmp_path / "model")
    draft = write_eagle3(tmp_path / "head", form=form)
    engine = head_engine(path, draft=str(draft))
    record = Recorder(monkeypatch, engine)
    tokens = play(engine)
    model, weights = load_file(path / "model.safetensors"), load_file(draft / "model.safetensors")
    assert len(record.rounds) >= 12
    for each in record.rounds:
        compare(record, each, tokens[each.session], eagle3(weights, model, form), weights["fc.weight"])
    for session, said in tokens.items():
        expected = torch.cat(streams(model, said), dim=-1)
        for place, found in record.seen[session].items():
            if place < len(said) - 1:
                torch.testing.assert_close(found, expected[place], atol=2e-3, rtol=2e-3)
    known = (torch.arange(EAGLE_WORDS) + weights["d2t"]).tolist()
    assert all(draft in known for each in record.rounds for draft in each.drafts)


def test_long_prompts_take_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a pass takes are fed in portions, and drafts follow as from one pass."""
    monkeypatch.setattr(head_passes, "FEED_TOKENS", 16)
    path = write_llama(tmp_path / "model")
    draft = write_eagle3(tmp_path / "head")
    engine = head_engine(path, draft=str(draft))
    record = Recorder(monkeypatch, engine)
    tokens = play(engine)
    model, weights = load_file(path / "model.safetensors"), load_file(draft / "model.safetensors")
    for each in record.rounds:
        compare(record, each, tokens[each.session], eagle3(weights, model, "eagle"), weights["fc.weight"])
    others = [engine.session().say([50 + number, *PROMPT], greedy(4)) for number in range(3)]
    assert all(turn.token_ids for turn in others)
    assert engine.loop.scheduler.registry.counters.drafted_tokens > 30 and head_of(engine)._failures == 0


# --- checkpoints that cannot be used ------------------------------------------------------------------


def changed(directory: Path, change: Callable[[Weights], None]) -> Path:
    """A checkpoint with changed weights."""
    file = directory / "model.safetensors"
    weights = {name: weight.clone() for name, weight in load_file(file).items()}
    change(weights)
    save_file(weights, file)
    return directory


def without(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def shorter(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(name, weights[name][:-1].clone())


def with_value(name: str, place: int, value: int) -> Callable[[Weights], None]:
    return lambda weights: weights[name].__setitem__(place, value)


def as_floats(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(name, weights[name].float())


def more(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(name, torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("mtp.fc.weight"), r"missing \(1\): mtp.fc.weight"),
        (
            without("mtp.layers.0.self_attn.q_norm.weight"),
            r"missing \(1\): mtp.layers.0.self_attn.q_norm.weight",
        ),
        (shorter("mtp.norm.weight"), r"mtp.norm.weight is \[31\], not \[32\]"),
        (more("mtp.layers.1.norm.weight"), r"unexpected \(1\): mtp.layers.1.norm.weight"),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if name.startswith("mtp.")],
            r"has no weights named mtp\.\*",
        ),
    ],
)
def test_a_prediction_head_that_cannot_be_used(
    tmp_path: Path, change: Callable[[Weights], None], problem: str
) -> None:
    path = changed(write_qwen(tmp_path, "dense"), change)
    with pytest.raises(OptionError, match=problem) as error:
        mtp_engine(path)
    assert error.value.option == "speculate"
    tiny_engine(write_qwen(tmp_path, "dense"), load_format="auto")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("midlayer.hidden_norm.weight"), r"missing \(1\): midlayer.hidden_norm.weight"),
        (without("d2t"), r"missing \(1\): d2t"),
        (without("lm_head.weight"), r"missing \(1\): lm_head.weight"),
        (shorter("fc.weight"), r"fc.weight is \[31, 96\], not \[32, 96\]"),
        (shorter("d2t"), r"d2t is \[95\], not \[96\]"),
        (as_floats("d2t"), r"d2t is float32, not int64 or int32"),
        (with_value("d2t", 95, 400), r"d2t maps token 95 to 495, and the model has 269 tokens"),
        (with_value("d2t", 0, -1), r"d2t maps token 0 to -1, and the model has 269 tokens"),
        (
            lambda weights: weights["d2t"].__setitem__(1, int(weights["d2t"][0]) - 1),
            "d2t maps several tokens",
        ),
        (lambda weights: weights["t2d"].zero_(), "t2d lacks tokens that d2t maps to"),
        (more("layers.1.norm.weight"), r"unexpected \(1\): layers.1.norm.weight"),
    ],
)
def test_an_eagle3_head_that_cannot_be_used(
    tmp_path: Path, change: Callable[[Weights], None], problem: str
) -> None:
    head = changed(write_eagle3(tmp_path / "head"), change)
    refused(write_llama(tmp_path / "model"), head, problem)


def refused(model: Path, head: Path, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as error:
        head_engine(model, draft=str(head))
    assert error.value.option == "draft" and str(error.value).startswith(f"draft {head} cannot be used: ")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"vocab_size": 300}, "'vocab_size' is 300, and the model's is 269"),
        ({"target_hidden_size": 64}, r"fc.weight takes hidden states of 64 .* and the model's have 32"),
        ({"num_hidden_layers": 2}, "EAGLE-3 heads of 2 layers are not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "should name 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1] * 3000}, "should name 3 layers, not 3000"),
        ({"eagle_config": None}, r"hidden states after layers \[2, 1, -1\] cannot be read: the model has 2"),
        ({"hidden_size": "wide"}, "'hidden_size' should be an integer"),
    ],
)
def test_a_description_that_does_not_fit(tmp_path: Path, fields: dict[str, object], problem: str) -> None:
    refused(write_llama(tmp_path / "model"), write_eagle3(tmp_path / "head", **fields), problem)


def test_heads_that_are_not_there(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "model")
    with pytest.raises(OptionError, match="mtp cannot be used: LlamaForCausalLM has no such head"):
        mtp_engine(llama)
    head = write_eagle3(tmp_path / "head")
    (head / "model.safetensors").unlink()
    refused(llama, head, "safetensors")
    with pytest.raises(OptionError, match="mtp cannot be used: echo has no weights"):
        Engine("echo", speculate="mtp")
    for options, problem in (
        ({"speculate": "mtp", "draft": "x"}, "mtp cannot be used with draft"),
        ({"speculate": "mtp", "tensor_parallel": 2}, "mtp cannot be used with tensor_parallel"),
        ({"draft_tokens": 100}, "draft_tokens has no effect without draft"),
    ):
        with pytest.raises(OptionError, match=problem):
            make_options(**options)


def test_the_usual_layers_are_read(tmp_path: Path) -> None:
    """Without numbers in the description: the residual stream after a low, a middle and a high layer."""
    model = write_model(tmp_path / "model", "llama", num_hidden_layers=8)
    for fields, expected in (
        ({"eagle_config": None}, (2, 4, 5)),
        ({}, (0, 1, 2)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 6, 8]}, (3, 6, 8)),
    ):
        draft = write_eagle3(tmp_path / "head", **fields)
        engine = head_engine(model, draft=str(draft), load_format="dummy")
        assert engine.loop.setup.model.taps == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 16, "target_hidden_size": 32, "intermediate_size": 24},
        {"draft_vocab_size": VOCABULARY, "attention_bias": True},
    ],
)
def test_heads_of_other_shapes(tmp_path: Path, fields: dict[str, object]) -> None:
    """A head that is narrower than the model, with an embedding of its own; one that has the model's head."""
    model = write_model(tmp_path / "model", "mistral")
    plain = tiny_engine(model)
    draft = write_eagle3(tmp_path / "head", **fields)
    engine = head_engine(model, draft=str(draft), load_format="dummy")
    prompts = [PROMPT, [7, 8, 9]]
    expected = [result.token_ids for result in plain.generate(prompts, greedy(16))]
    assert [result.token_ids for result in engine.generate(prompts, greedy(16))] == expected
    head = head_of(engine).passes.model
    assert head.config.width == fields.get("hidden_size", 32)
    assert engine.loop.scheduler.registry.counters.drafted_tokens > 50 and head_of(engine)._failures == 0
