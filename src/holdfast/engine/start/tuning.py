"""The sizes that fit a device: page size, steps, running turns, checkpoints; each with its reason.

Rules over plain numbers, without torch: `memory_plan` measures the device and asks them. A size that an
option states is taken as it is. On a CPU the sizes are constants. On a GPU the step is as large as its time
and memory allow, and steps beside answers are bounded (core/step_size.py).

The page size depends on the model and the kind of device alone. Files of spilled sessions are valid for one
page size, so it must not change with the memory that happens to be free at a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

__all__ = [
    "Choice",
    "StepCost",
    "Tuning",
    "choose_checkpoints",
    "choose_chunk",
    "choose_mixed",
    "choose_page_size",
    "choose_running",
    "choose_step",
    "stated",
]

CPU_PAGE_SIZE, GPU_PAGE_SIZE = 16, 64
CPU_CHUNK_TOKENS = 512
CPU_STEP_TOKENS, GPU_STEP_TOKENS, STEP_TOKENS_MIN = 1024, 8192, 512
CPU_RUNNING, GPU_RUNNING, RUNNING_MIN = 64, 256, 8
CHECKPOINTS = 8

STEP_SECONDS = 0.3
"""Longest step of inputs alone: a turn that comes meanwhile waits for its end."""

STEP_MEMORY = 1 / 8
"""The largest share of the free memory that the activations of one step may take."""

WINDOW_SHARE = 1 / 2
"""The largest share of the sliding-window pool that one chunk may take."""

RUNNING_TOKENS = 1024
"""Tokens of the full-attention pool for each turn that may run."""

EAGER_MIXED_TOKENS = 512
"""Tokens of a step beside answers without graphs: below this, launching its kernels takes longest."""

GIVEN = "as given"
ON_A_CPU = "default on a CPU"


class Choice(NamedTuple):
    """A size, and why it was chosen."""

    value: int
    why: str


class StepCost(NamedTuple):
    """The device time of a step of that many tokens; the seconds are 0 if they were not measured."""

    tokens: int
    bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """The sizes of one engine, in the order in which they are shown."""

    page_size: int
    chunk_tokens: int
    step_tokens: int
    mixed_tokens: int
    max_running: int
    checkpoints: int
    reasons: tuple[str, ...]
    """The reason for each size, in the same order."""

    @classmethod
    def of(
        cls,
        page_size: Choice,
        chunk_tokens: Choice,
        step_tokens: Choice,
        mixed_tokens: Choice,
        max_running: Choice,
        checkpoints: Choice,
    ) -> Tuning:
        """The sizes of these choices."""
        choices = (page_size, chunk_tokens, step_tokens, mixed_tokens, max_running, checkpoints)
        return cls(
            page_size.value,
            chunk_tokens.value,
            step_tokens.value,
            mixed_tokens.value,
            max_running.value,
            checkpoints.value,
            tuple(choice.why for choice in choices),
        )

    def options(self) -> dict[str, int]:
        """The sizes by the names of their options."""
        return {
            "page_size": self.page_size,
            "chunk_tokens": self.chunk_tokens,
            "step_tokens": self.step_tokens,
            "mixed_tokens": self.mixed_tokens,
            "max_running": self.max_running,
            "checkpoints": self.checkpoints,
        }

    def lines(self) -> list[str]:
        """The sizes with their reasons as text: one line for neighbours with the same reason."""
        named = [f"{name.replace('_', '-')} {value}" for name, value in self.options().items()]
        return [
            f"{', '.join(name for name, _ in group)}: {why}"
            for why, group in groupby(zip(named, self.reasons, strict=True), key=lambda each: each[1])
        ]


def stated(value: int | None) -> Choice | None:
    """The choice of somebody who stated a size."""
    return None if value is None else Choice(value, GIVEN)


def choose_page_size(gpu: bool, window_tokens: int) -> Choice:
    """Tokens per page, from the kind of device and the model's sliding window (0: none)."""
    if not gpu:
        return Choice(CPU_PAGE_SIZE, ON_A_CPU)
    size = GPU_PAGE_SIZE
    while window_tokens and size > CPU_PAGE_SIZE and 2 * size > window_tokens:
        size //= 2
    if size < GPU_PAGE_SIZE:
        return Choice(size, f"a sliding window of {window_tokens} tokens has at least two pages")
    return Choice(size, "on a GPU, for short block tables and long reads")


def choose_step(gpu: bool, cost: StepCost | None, free_bytes: int) -> Choice:
    """Tokens of a step without answers, at most those measured.

    `cost` is that of the largest step that ran, beside `free_bytes` of memory; None on a CPU.
    """
    if not gpu or cost is None:
        return Choice(CPU_STEP_TOKENS, ON_A_CPU)
    tokens = cost.tokens
    while tokens > STEP_TOKENS_MIN and (
        cost.seconds * tokens / cost.tokens > STEP_SECONDS
        or cost.bytes * tokens / cost.tokens > STEP_MEMORY * free_bytes
    ):
        tokens //= 2
    part = tokens / cost.tokens
    took = f"takes {cost.seconds * part:.2f} s and {cost.bytes * part / 1e9:.1f} GB"
    return Choice(tokens, f"{took}, of at most {STEP_SECONDS} s and 1/8 of the free memory")


def choose_chunk(gpu: bool, step_tokens: int, window_pool: int | None) -> Choice:
    """Tokens of one turn in a step; `window_pool` are the tokens that the sliding-window pool holds."""
    if not gpu:
        return Choice(CPU_CHUNK_TOKENS, ON_A_CPU)
    if window_pool is not None and step_tokens > WINDOW_SHARE * window_pool:
        fitting = max(1, int(WINDOW_SHARE * window_pool))
        return Choice(fitting, f"half of the {window_pool} tokens that the sliding-window pool holds")
    return Choice(step_tokens, "a whole step where no other turn waits")


def choose_mixed(gpu: bool, step_tokens: int, small_step: int, graphs: bool) -> Choice:
    """Tokens of a step beside answers; `small_step` is where a step of this model begins to take longer."""
    if not gpu:
        return Choice(step_tokens, ON_A_CPU)
    if not graphs:
        return Choice(EAGER_MIXED_TOKENS, "beside answers, without graphs: fewer tokens take as long")
    return Choice(small_step, "beside answers, where a step takes little longer than a decode step")


def choose_running(gpu: bool, tokens: int | None, window_turns: int | None, slots: int | None) -> Choice:
    """Turns that may run at once.

    `tokens` is the size of the full-attention pool, `window_turns` how many turns the sliding-window pool has
    room for, and `slots` the number of recurrent states; None where the model has no such pool.
    """
    if not gpu:
        return Choice(CPU_RUNNING, ON_A_CPU)
    rooms = [
        (tokens, RUNNING_TOKENS, f"one for {RUNNING_TOKENS} tokens of KV cache"),
        (window_turns, 1, "one for each window that the sliding-window pool holds"),
        (slots, 2, "one for two recurrent states"),
    ]
    known = [(room // each, why) for room, each, why in rooms if room is not None]
    fewest, why = min(known, default=(GPU_RUNNING, ""))
    if fewest >= GPU_RUNNING:
        return Choice(GPU_RUNNING, "the most; the pools have room for more")
    return Choice(max(RUNNING_MIN, fewest), f"{why}, at least {RUNNING_MIN}")


def choose_checkpoints(gpu: bool) -> Choice:
    """Older turns of a session that keep a checkpoint."""
    return Choice(CHECKPOINTS, "evicted before any session" if gpu else ON_A_CPU)
