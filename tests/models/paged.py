"""A minimal driver of a model over paged memory, for tests: no scheduler, but the same kind of batches.

Pages come from a shuffled free list, so that neighbours in a sequence are not neighbours in memory. All
storage begins as NaN and pages that leave the window point at one that is never written: whatever reads
something that it must not see turns the logits into NaN. States are written to another slot than they are
read from, in every step.
"""

import random
from dataclasses import dataclass, field

import torch

from holdfast.kernels import build_batch
from holdfast.models.memory import UnitCounts
from holdfast.models.model import Model

POISON = 0


@dataclass
class Sequence:
    """One sequence: the tokens whose memory is computed, and where that memory lies."""

    tokens: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    slot: int = -1


class PagedRunner:
    """Runs rows of a model and owns the units of its sequences."""

    def __init__(self, model: Model, page_size: int, tokens: int = 1024, sequences: int = 6) -> None:
        shape = model.memory_shape
        pages = -(-tokens // page_size) + 2 * sequences + 1
        self.model = model
        self.page_size = page_size
        self.memory = model.memory(UnitCounts(full=pages, window=pages, state=2 * sequences + 1), page_size)
        for component in shape.components:
            for storage in self.memory.storage(component):
                storage.fill_(torch.nan)
        shuffle = random.Random(page_size)
        self.free = {name: list(range(1, pages)) for name in ("full", "window")}
        self.free["state"] = list(range(2 * sequences + 1))
        for units in self.free.values():
            shuffle.shuffle(units)

    def run(self, rows: list[tuple[Sequence, list[int]]]) -> list[torch.Tensor]:
        """Computes new tokens of each sequence in one batch; the logits of all tokens of each row."""
        shape = self.model.memory_shape
        starts = [len(sequence.tokens) for sequence, _ in rows]
        destinations = []
        for sequence, tokens in rows:
            pages = -(-(len(sequence.tokens) + len(tokens)) // self.page_size)
            if shape.full is not None:
                sequence.full += [self.free["full"].pop() for _ in range(pages - len(sequence.full))]
            if shape.window is not None:
                sequence.window += [self.free["window"].pop() for _ in range(pages - len(sequence.window))]
            destinations.append(self.free["state"].pop())
        batch = build_batch(
            [tokens for _, tokens in rows],
            starts,
            full_units=[sequence.full for sequence, _ in rows] if shape.full is not None else None,
            full_page_size=self.page_size,
            window_units=[sequence.window for sequence, _ in rows] if shape.window is not None else None,
            window_page_size=self.page_size,
            state_source=[sequence.slot for sequence, _ in rows],
            state_destination=destinations,
            device=self.model.device,
        )
        logits = self.model.logits(self.model.forward(batch, self.memory)).float()
        for (sequence, tokens), destination in zip(rows, destinations, strict=True):
            if sequence.slot >= 0:
                self.free["state"].append(sequence.slot)
            sequence.slot = destination
            sequence.tokens += tokens
            self._leave_window(sequence)
        return list(logits.split([len(tokens) for _, tokens in rows]))

    def _leave_window(self, sequence: Sequence) -> None:
        """Gives back the window pages that no later token can see."""
        first = max(0, len(sequence.tokens) - self.model.memory_shape.window_tokens + 1) // self.page_size
        for page in range(min(first, len(sequence.window))):
            if sequence.window[page] != POISON:
                self.free["window"].append(sequence.window[page])
                sequence.window[page] = POISON


def generate(
    model: Model, prompts: list[list[int]], *, page_size: int, chunk: int, count: int
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Greedy tokens of several prompts as one ragged, mixed batch.

    Rows that are still in their prompt compute `chunk` tokens a step while others decode. Answers, for each
    prompt, the logits of every computed position and the generated tokens.
    """
    total = sum(len(prompt) + count for prompt in prompts)
    runner = PagedRunner(model, page_size, tokens=total, sequences=len(prompts))
    sequences = [Sequence() for _ in prompts]
    known = [list(prompt) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while True:
        rows, indices = [], []
        for index, sequence in enumerate(sequences):
            done = len(sequence.tokens)
            if done < len(prompts[index]) + count - 1:
                rows.append((sequence, known[index][done : done + chunk]))
                indices.append(index)
        if not rows:
            break
        for index, row_logits in zip(indices, runner.run(rows), strict=True):
            logits[index].append(row_logits)
            if len(sequences[index].tokens) == len(known[index]):
                known[index].append(int(row_logits[-1].argmax()))
    generated = [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
    return [torch.cat(parts) for parts in logits], generated
