"""One model under both implementations, and an engine that is watched while it runs.

A `Subject` is a model of transformers and the same weights in ours. A `Watched` engine records the logits
that every token was sampled from, begins with memory full of NaN (what reads a page that nobody wrote shows),
audits everything after every step, and counts the tokens that it computes. `check` asks transformers for
the logits of a whole transcript at once: each recorded one must agree, and each generated token must be the
most likely one (of two that agree within the tolerance, either), which by induction makes it the token that
greedy decoding gives.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from tokenizers import Tokenizer as Encoder
from tokenizers import models
from transformers import PreTrainedModel

from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.assembly import build_loop
from holdfast.engine.step.sampler import Sampled
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import Model
from tests.models.reference import VOCABULARY, Reference

TOLERANCE = 1e-4
SIZES = {"kv_tokens": 4096, "window_tokens": 2048, "state_slots": 64, "max_running": 16}


@dataclass(frozen=True)
class Subject:
    """The same weights twice, and what transformers says to a few prompts."""

    name: str
    theirs: PreTrainedModel
    ours: Model
    reference: Reference
    errors: list[float] = field(default_factory=list)
    """The largest difference of each turn that was compared, of the largest logit."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of every position, computed at once and without a cache."""
        with torch.inference_mode():
            answer: torch.Tensor = self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]
        return answer


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def greedy(count: int, **more: object) -> Sampling:
    """The most likely token, `count` times."""
    return Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def number_tokenizer(size: int = VOCABULARY) -> Tokenizer:
    """A vocabulary whose tokens are written as their numbers."""
    encoder = Encoder(models.WordLevel({f"{number}": number for number in range(size)}, unk_token="0"))
    return Tokenizer(encoder, template=None, names={}, eos_tokens=())


class Watched:
    """An engine in the strictest mode, and what it did."""

    def __init__(self, subject: Subject, **options: object) -> None:
        self.subject = subject
        chosen = make_options(**{**SIZES, "audit": "strict", "page_size": 16, **options})
        self.loop = build_loop(subject.ours, number_tokenizer(), GenerationDefaults(), chosen)
        self.engine = Engine(self.loop)
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        memory = self.loop.executor.memory
        for component in subject.ours.memory_shape.components:
            for storage in memory.storage(component):
                storage.fill_(torch.nan)
        self._watch()

    def _watch(self) -> None:
        executor = self.loop.executor
        sample = executor.sampler.sample

        def watched(logits: torch.Tensor, rows: list[int], positions: list[int], *masks: Any) -> Sampled:
            owners = {place: number for number, (place, _) in executor._sampler_rows.items()}
            for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
                self.seen[owners[row], position] = logits[index].clone()
            return sample(logits, rows, positions, *masks)

        executor.sampler.sample = watched  # type: ignore[method-assign,assignment]

    def __enter__(self) -> "Watched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.close()
            assert self.engine.audit() == []
            assert self.loop.scheduler.audit.findings == []
            self.loop.scheduler.flush()
            self.loop.step()
            for pool in self.loop.scheduler.registry.ledger.pools.values():
                assert len(pool.free) == pool.size, f"{pool.counts()} are left when everything is closed"

    @property
    def computed(self) -> int:
        """Tokens that went through the model."""
        return self.loop.executor.tokens_computed

    @property
    def retracts(self) -> int:
        return self.loop.scheduler.registry.counters.retracts

    def history(self, session: Session) -> list[int]:
        """Everything that a session knows."""
        tokens = self.loop.scheduler.registry.find(session.id).sequence.tokens
        return tokens.slice(0, len(tokens))

    def rest(self) -> None:
        """Step until nothing is left to do."""
        while self.loop.busy:
            self.loop.step()

    def check(self, turn: Turn, before: list[int], said: list[int] | None = None) -> list[int]:
        """A turn after the tokens `before`, its input included: logits agree and tokens are greedy."""
        core = turn._turn
        tokens = turn.token_ids if said is None else said
        assert tokens, "a turn says something"
        transcript = before + tokens
        expected = self.subject.logits(transcript[:-1])[len(before) - 1 :]
        scale = expected.abs().max()
        chosen = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert ((expected.amax(dim=-1) - chosen) <= 2 * TOLERANCE * scale).all(), "not the most likely token"
        found = torch.stack([self.seen[core.number, len(before) + place] for place in range(len(tokens))])
        error = ((found - expected).abs().max() / scale).item()
        self.subject.errors.append(error)
        assert error <= TOLERANCE, f"{self.subject.name}: {error:.2e}"
        return transcript

    def check_count(self, turn: Turn, *, new: int, again: int = 0) -> None:
        """A turn of `new` tokens computed those and what it said; with a state also `again` at most."""
        if self.subject.ours.memory_shape.state is None:
            again = 0
        usage = turn.usage
        history = usage.prompt_tokens - new
        # The last token of the turn before may be computed with this one.
        assert history - again - bool(again) <= usage.cached_tokens <= history
        assert new + usage.completion_tokens - 1 <= usage.computed_tokens
        assert usage.computed_tokens <= new + usage.completion_tokens + again
