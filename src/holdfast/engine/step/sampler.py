"""One token for each row of logits, for a whole batch at once.

A `BatchSampler` keeps the parameters of every batch row: the executor admits a row when its turn begins,
samples it in any batch, and releases it. A row's token is a function of its own logits, history, seed and
position alone. Nothing here synchronises with the device: tokens stay tensors, and a row with non-finite
logits gets -1. Plain rows are sampled inside a graph, which reads their parameters from the step's words;
rows with penalties, biases or log-probabilities are sampled by `sample`, and so are rows under token masks.
Called by the executor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.sampling import Sampling
from holdfast.engine.step.inputs import Parameters
from holdfast.kernels import TokenMasks, sample_tokens

COLDEST = 1e-5
"""Below this temperature sampling is greedy: logits over it would be lost in rounding."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step's rows, int64 [rows], -1 for rows with non-finite logits.

    `logprob_rows` are the indices (in the step) of the rows that asked for log-probabilities; for those,
    `logprobs` [rows asked] are of the sampled tokens, `top_ids` and `top_logprobs` [rows asked, most asked]
    of the most likely ones, best first. All are of the model's own distribution: before penalties, biases,
    the temperature and masks.
    """

    tokens: Tensor
    logprob_rows: tuple[int, ...]
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's sampling state beside the parameter tensors."""

    sampling: Sampling
    penalised: bool
    ends: tuple[int, ...]
    """Tokens that are banned before `free_position`."""
    end_tokens: Tensor | None
    """The same on the device."""
    free_position: int
    bias_tokens: Tensor | None
    bias_values: Tensor | None

    def special(self, position: int) -> bool:
        """Whether a token at a position needs more than the row's parameters."""
        return (
            self.penalised
            or self.bias_tokens is not None
            or self.sampling.logprobs is not None
            or (self.end_tokens is not None and position < self.free_position)
        )


PADDING = _Row(Sampling(temperature=0.0), False, (), None, 0, None, None)
"""The state of the padding row."""


class BatchSampler:
    """The sampling state of `rows` batch rows and a greedy padding row, over a vocabulary."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._rows: list[_Row | None] = [*[None] * rows, PADDING]
        self.padding_row = rows
        self.parameters = Parameters(
            np.zeros(rows + 1, dtype=np.int64),
            np.zeros((3, rows + 1), dtype=np.float32),
            np.zeros(rows + 1, dtype=np.int32),
        )
        self._penalties = np.zeros((3, rows + 1), dtype=np.float32)
        self._generated_counts: Tensor | None = None
        self._seen: Tensor | None = None

    def admit(
        self,
        row: int,
        sampling: Sampling,
        *,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        end_tokens: Sequence[int] = (),
    ) -> None:
        """Admit a row. `sampling` has its defaults filled in; `generated` are the turn's tokens so far.

        `end_tokens` end the turn and are banned before `min_tokens` tokens.
        """
        assert self._rows[row] is None, f"row {row} is already admitted"
        assert sampling.top_p is not None
        assert sampling.top_k is not None and sampling.min_p is not None
        assert sampling.repetition_penalty is not None and sampling.seed is not None
        self.parameters.seeds[row] = sampling.seed
        self.parameters.floats[:, row] = _heat(sampling), sampling.top_p, sampling.min_p
        # top_k of the vocabulary or more is no limit.
        self.parameters.top_k[row] = min(max(0, sampling.top_k), self._vocabulary)
        self._penalties[:, row] = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        penalised = sampling.repetition_penalty != 1.0 or bool(
            sampling.frequency_penalty or sampling.presence_penalty
        )
        if penalised:
            self._remember(row, prompt, generated)
        # A checkpoint may name end tokens outside the vocabulary.
        named = (*end_tokens, *sampling.stop_token_ids) if sampling.min_tokens else ()
        ends = tuple(token for token in named if token < self._vocabulary)
        bias = sampling.logit_bias
        self._rows[row] = _Row(
            sampling=sampling,
            penalised=penalised,
            ends=ends,
            end_tokens=self._integers(ends) if ends else None,
            free_position=len(prompt) + sampling.min_tokens,
            bias_tokens=self._integers(list(bias)) if bias else None,
            bias_values=self._brought(np.array(list(bias.values()), np.float32)) if bias else None,
        )

    def release(self, row: int) -> None:
        """Release a row and reset its parameters to the padding values."""
        assert self._rows[row] is not None, f"row {row} is not admitted"
        self._rows[row] = None

    def plain(self, rows: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether all rows need only their parameters, so that a graph can sample them."""
        return not any(
            self._state(row).special(position) for row, position in zip(rows, positions, strict=True)
        )

    def counts(self, row: int) -> bool:
        """Whether a row counts its tokens, so that a token of a lost step must be uncounted."""
        return self._state(row).penalised

    def banned(self, row: int, position: int) -> tuple[int, ...]:
        """The end tokens that may not come at a position, before the turn's `min_tokens`."""
        state = self._state(row)
        return state.ends if position < state.free_position else ()

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        masks: TokenMasks | None = None,
        masked: Collection[int] = (),
    ) -> Sampled:
        """The next token of each row from float32 logits [rows, vocabulary], among those that masks allow.

        `positions` are the tokens' positions in their sequences, prompt included. The logits may be changed
        in place. Rows at the indices `masked` have a mask, from which banned end tokens are already taken.
        """
        assert logits.shape == (len(rows), self._vocabulary)
        states = [self._state(row) for row in rows]
        asked = tuple(index for index, state in enumerate(states) if state.sampling.logprobs is not None)
        # Indices are copied explicitly: an index tensor made by torch from a list synchronises.
        places = self._integers(asked) if asked else None
        plain = None if places is None else torch.log_softmax(logits.index_select(0, places), dim=-1)
        self._adjust(logits, states, rows, positions, masked)
        heat, top_p, min_p = self._brought(self.parameters.floats[:, rows])
        tokens = sample_tokens(
            logits,
            heat,
            self._brought(self.parameters.top_k[rows]),
            top_p,
            min_p,
            self._brought(self.parameters.seeds[rows]),
            self._integers(positions),
            # Under masks there is one variant of the kernels, compiled at startup.
            greedy=masks is None and not any(_heat(state.sampling) for state in states),
            masks=masks,
        )
        self._count(states, rows, tokens)
        if places is None or plain is None:
            return Sampled(tokens, (), None, None, None)
        most = max(states[place].sampling.logprobs or 0 for place in asked)
        chosen = tokens.index_select(0, places).clamp(min=0)
        top = plain.topk(most, dim=-1)
        return Sampled(tokens, asked, plain.gather(1, chosen[:, None]).squeeze(1), top.indices, top.values)

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} is not admitted"
        return state

    def _adjust(
        self,
        logits: Tensor,
        states: list[_Row],
        rows: Sequence[int],
        positions: Sequence[int],
        masked: Collection[int],
    ) -> None:
        """Apply penalties, biases and banned end tokens in place, for the rows that have them."""
        penalised = [place for place, state in enumerate(states) if state.penalised]
        if penalised:
            places, mine = self._integers(penalised), [rows[place] for place in penalised]
            logits[places] = self._penalise(logits[places], mine)
        for place, state in enumerate(states):
            if state.bias_tokens is not None and state.bias_values is not None:
                logits[place].index_add_(0, state.bias_tokens, state.bias_values)
            if place in masked:
                continue
            if state.end_tokens is not None and positions[place] < state.free_position:
                logits[place].index_fill_(0, state.end_tokens, -torch.inf)

    def _penalise(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Repetition scales the logits of seen tokens, the others subtract for generated ones."""
        assert self._seen is not None and self._generated_counts is not None
        index = self._integers(rows)
        repetition, frequency, presence = self._brought(self._penalties[:, rows]).unsqueeze(2).unbind()
        factor = torch.where(self._seen[index], repetition, 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        counts = self._generated_counts[index]
        logits = logits - frequency * counts
        return logits - presence * (counts > 0)

    def _remember(self, row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Count the tokens of a penalised row; the tables are allocated with the first such row."""
        if self._generated_counts is None or self._seen is None:
            size = (self.padding_row, self._vocabulary)
            self._generated_counts = torch.zeros(size, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
        said = self._integers(generated)
        self._seen[row].zero_()
        self._seen[row, self._integers(prompt)] = True
        self._seen[row, said] = True
        self._generated_counts[row].zero_().index_add_(0, said, torch.ones_like(said, dtype=torch.int32))

    def _count(self, states: list[_Row], rows: Sequence[int], tokens: Tensor) -> None:
        penalised = [place for place, state in enumerate(states) if state.penalised]
        if not penalised:
            return
        assert self._seen is not None and self._generated_counts is not None
        index = self._integers([rows[place] for place in penalised])
        said = tokens[self._integers(penalised)].clamp(min=0)
        self._seen[index, said] = True
        ones = torch.ones_like(said, dtype=torch.int32)
        self._generated_counts.index_put_((index, said), ones, accumulate=True)

    def _brought(self, values: NDArray[Any]) -> Tensor:
        """A host array copied to the device, row by row."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self._device, non_blocking=True)


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens [rows] under logits [rows, vocabulary], and of the `top` best ones.

    Returns (of the tokens, ids of the best, their values), for prompt log-probabilities.
    """
    values = torch.log_softmax(logits.float(), dim=-1)
    best = values.topk(top, dim=-1)
    return values.gather(1, tokens[:, None]).squeeze(1), best.indices, best.values


def _heat(sampling: Sampling) -> float:
    """The effective temperature of a row; 0: greedy."""
    assert sampling.temperature is not None
    return sampling.temperature if sampling.temperature >= COLDEST else 0.0
