"""Workloads: how often simulated clients do what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Chances of each action in a step, and the sizes of things. Chances are weights, not probabilities.

    `present` sessions are open when the world begins; at most `sessions` may be. A world that is not `strict`
    is too large to be counted whole after every step: its audit works in slices. Lower tiers are there with a
    chance of at least `tiers`. `deaths` says how often the process is killed, beside other faults.
    """

    name: str
    actions: dict[str, float]
    sessions: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    actions_per_step: float = 1.0
    shared_prompts: int = 3
    strict: bool = True
    present: int = 0
    tiers: float = 0.0
    deaths: float = 0.04


_CALM = {"open": 2.0, "turn": 12.0, "close": 0.6, "request": 1.0, "durable": 0.5, "flush": 0.05}

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "voice",
            _CALM | {"interrupt": 5.0, "cut last": 3.0, "spill": 0.3},
            sessions=8,
            input_tokens=(1, 9),
            output_tokens=(2, 14),
        ),
        Workload(
            "listening",
            _CALM
            | {
                "listen": 9.0,
                "say": 14.0,
                "commit": 6.0,
                "abandon": 2.0,
                "turn": 4.0,
                "interrupt": 2.0,
                "cut last": 1.0,
                "spill": 1.0,
                "fork": 0.5,
                "rewind": 0.5,
            },
            sessions=8,
            input_tokens=(1, 30),
            output_tokens=(1, 10),
            actions_per_step=1.5,
        ),
        Workload(
            "agents",
            _CALM
            | {
                "interrupt": 1.0,
                "rewind": 2.5,
                "fork": 3.0,
                "request": 2.0,
                "spill": 0.5,
                "compact": 1.5,
            },
            sessions=6,
            input_tokens=(4, 60),
            output_tokens=(1, 30),
        ),
        Workload(
            "crowd",
            _CALM | {"open": 6.0, "turn": 4.0, "spill": 0.5, "interrupt": 0.5},
            sessions=3000,
            input_tokens=(1, 12),
            output_tokens=(1, 6),
            actions_per_step=3.0,
            strict=False,
            present=2000,
        ),
        Workload(
            "adversary",
            _CALM
            | {
                "interrupt": 6.0,
                "busy turn": 4.0,
                "stale abort": 3.0,
                "double close": 2.0,
                "too long": 2.0,
                "unknown": 1.0,
                "empty": 1.0,
                "rewind": 2.0,
                "fork": 2.0,
                "close": 2.5,
                "spill": 2.0,
                "cut last": 2.0,
                "goes on": 2.0,
            },
            sessions=7,
            input_tokens=(1, 40),
            output_tokens=(1, 20),
            actions_per_step=2.0,
        ),
        Workload(
            "mix",
            _CALM
            | {
                "interrupt": 3.0,
                "cut last": 1.5,
                "rewind": 1.0,
                "fork": 1.5,
                "spill": 1.0,
                "busy turn": 0.5,
                "stale abort": 0.5,
                "double close": 0.5,
                "goes on": 0.5,
                "too long": 0.3,
            },
            sessions=9,
            input_tokens=(1, 50),
            output_tokens=(1, 24),
        ),
        Workload(
            "chats",
            {
                "chat": 14.0,
                "open": 0.7,
                "turn": 1.5,
                "turn at": 2.0,
                "fork at": 1.5,
                "keep too much": 1.0,
                "interrupt": 3.0,
                "cut last": 1.0,
                "compact": 2.0,
                "rewind": 0.5,
                "request": 0.5,
                "close": 0.6,
                "spill": 1.5,
                "write out": 0.7,
                "restore": 0.7,
                "durable": 0.5,
                "flush": 0.05,
            },
            sessions=5,
            input_tokens=(1, 20),
            output_tokens=(1, 16),
            actions_per_step=1.4,
            tiers=0.7,
        ),
        Workload(
            "tiers",
            {
                "open": 2.0,
                "turn": 6.0,
                "spill": 6.0,
                "write out": 0.5,
                "restore": 1.5,
                "expect": 5.0,
                "interrupt": 1.0,
                "cut last": 1.0,
                "rewind": 1.5,
                "fork": 0.7,
                "close": 0.5,
                "durable": 0.5,
            },
            sessions=8,
            input_tokens=(1, 30),
            output_tokens=(1, 12),
            actions_per_step=1.5,
            tiers=0.9,
            deaths=0.2,
        ),
    )
}
