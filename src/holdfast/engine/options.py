"""The options of an engine, with their defaults and limits.

One frozen value for the command line, the environment, the configuration file and the Python API. A wrong
value is an error that names the option: first the type is checked, which is the field's, then the range. Not
msgspec.convert, because the engine runs on GPU machines without msgspec (docs/decisions/0019).
"""

from __future__ import annotations

import collections.abc
import functools
import logging
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from holdfast.core.layout import PAGE_SIZE_MAX
from holdfast.engine.durable.places import fault_of, is_database
from holdfast.engine.tools.options import AUTO, REASONING_PARSERS, TOOL_PARSERS

log = logging.getLogger("holdfast.engine")

TIERS = ("device", "host", "disk")

COUNTS = (
    "session_tokens",
    "max_queue",
    "max_sessions",
    "tensor_parallel",
)
COUNTS_OR_NONE = (
    "context_length",
    "page_size",
    "max_running",
    "chunk_tokens",
    "step_tokens",
    "mixed_tokens",
    "kv_tokens",
    "window_tokens",
    "state_slots",
    "tenant_sessions",
    "disk_limit",
    "draft_tokens",
)
"""Options that are whole numbers of at least 1, or None."""

MOST: Mapping[str, int] = {
    **dict.fromkeys((*COUNTS, *COUNTS_OR_NONE), (1 << 31) - 1),
    **dict.fromkeys(
        ("disk_limit", "host_memory", "checkpoints", "session_ttl", "snapshot_seconds", "seal_seconds"),
        1 << 60,
    ),
    "page_size": PAGE_SIZE_MAX,
    "tensor_parallel": 64,
    "max_running": 1 << 16,
}
"""Upper limits: 32-bit for counts that are in tables, 60-bit for times and sizes."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_dtype": ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"),
    "state_dtype": ("auto", "float32", "int8"),
    "load_format": ("auto", "dummy"),
    "durability": ("off", "commit", "fsync"),
    "speculate": ("none", "ngram", "mtp"),
    "audit": ("on", "strict"),
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""The options with a fixed set of values. A device may also be one of several GPUs, such as `cuda:1`."""

PARTS = f"a mapping from tenants to mappings from {', '.join(TIERS)} to numbers"
WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "None",
    collections.abc.Mapping: PARTS,
    Literal: "a text",
}
"""The types of options in the words of error messages."""


class OptionError(ValueError):
    """An option has an invalid value; `option` is its name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}")
        self.option = option
        self.problem = problem

    @property
    def typed(self) -> str:
        """The error message, with the option named as on the command line."""
        return f"--{self.option.replace('_', '-')} {self.problem}"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is set up. None means: derived from the model and the machine (tuning.py).

    With `tensor_parallel` of N the model is divided over N processes, each with a GPU of its own or, on a
    CPU, with a part of the cores; sizes in bytes are of all of them together.
    `kv_dtype` is the type of keys and values in memory: the model's own, or eight bits (`fp8`). `state_dtype`
    is the type of recurrent states that no turn computes with: as those of turns, or eight bits (`int8`).
    A step has at most `step_tokens` tokens, `chunk_tokens` of one turn, and `mixed_tokens` beside answers.
    `kv_tokens`, `window_tokens` and `state_slots` size the pools; without them the pools are sized for
    sessions of `session_tokens` tokens. `host_memory` is in bytes. With a `journal` (a file, or the URL of a
    PostgreSQL database) sessions survive the process; `durability` says what answers wait for. `disk` is a
    directory for the memory of idle sessions, of at most `disk_limit` bytes; a session is written there after
    `snapshot_seconds` without a turn. The last token of a turn is left for `seal_seconds` to the turn that
    follows. `overlap` plans a step while the one before runs; by default on a GPU, unless tokens are drafted.
    `pack_weights` also keeps weights in twelve bits, on GPUs that read those faster. `fast_start` captures no
    CUDA graphs. `speculate` drafts tokens from n-grams of the text, or with the multi-token-prediction head
    of the checkpoint (`mtp`). `draft` is a small model of the same vocabulary that drafts tokens for this
    one, or an EAGLE-3 head of it.
    The cache of either has `draft_tokens` tokens.
    `tool_parser` and `reasoning_parser` name how the model writes tool calls and marks its reasoning; `auto`
    finds that out, `none` reads neither.
    A tenant may hold the fraction `tenant_device` of the device's memory (1 is all of it), and likewise of
    the host's and the disk's; its pinned sessions may keep the fraction `tenant_pinned` of its part of the
    device. `tenant_shares` has other fractions for single tenants: by name, then by tier.
    `cache` is the directory for downloaded models and compiled kernels; `cpu_kernels` and `cuda_kernels`
    switch our C and CUDA kernels, and `c_compiler` compiles the former.
    """

    device: str = "auto"
    tensor_parallel: int = 1
    dtype: str = "auto"
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    context_length: int | None = None
    page_size: int | None = None
    kv_tokens: int | None = None
    window_tokens: int | None = None
    state_slots: int | None = None
    session_tokens: int = 8192
    memory_fraction: float | None = None
    host_memory: int = 0
    max_running: int | None = None
    chunk_tokens: int | None = None
    step_tokens: int | None = None
    mixed_tokens: int | None = None
    max_queue: int = 4096
    max_sessions: int = 10_000
    tenant_sessions: int | None = None
    tenant_device: float = 1.0
    tenant_host: float = 1.0
    tenant_disk: float = 1.0
    tenant_pinned: float = 0.25
    tenant_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    session_ttl: float = 3600.0
    checkpoints: int | None = None
    leave_history: bool = True
    journal: str | None = None
    durability: Literal["off", "commit", "fsync"] = "commit"
    disk: str | None = None
    disk_limit: int | None = None
    snapshot_seconds: float = 2.0
    seal_seconds: float = 0.0
    overlap: bool | None = None
    pack_weights: bool | None = None
    fast_start: bool = False
    speculate: Literal["none", "ngram", "mtp"] = "none"
    draft: str | None = None
    draft_tokens: int | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    audit: Literal["on", "strict"] = "on"
    cache: str | None = None
    cpu_kernels: bool = True
    cuda_kernels: bool = True
    c_compiler: str = "cc"

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            require_kind(name, getattr(self, name), kind)
        for name in (*COUNTS, *COUNTS_OR_NONE):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be a whole number of at least 1, not {value!r}")
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and most < value < float("inf"):  # inf is allowed
                raise OptionError(name, f"must be at most {most}, not {value}")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 0.98:
            raise OptionError(
                "memory_fraction", f"must be more than 0 and at most 0.98, not {self.memory_fraction}"
            )
        for tier in TIERS:
            require_part(f"tenant_{tier}", getattr(self, f"tenant_{tier}"))
        require_part("tenant_pinned", self.tenant_pinned)
        for tenant, parts in self.tenant_shares.items():
            for tier, part in parts.items():
                if tier not in TIERS:
                    raise OptionError(
                        "tenant_shares", f"of {tenant}: {tier} must be one of {', '.join(TIERS)}"
                    )
                require_part("tenant_shares", part)
        for name in ("host_memory", "checkpoints"):
            if (getattr(self, name) or 0) < 0:
                raise OptionError(name, "must not be negative")
        if not self.session_ttl > 0:
            raise OptionError("session_ttl", f"must be a positive number of seconds, not {self.session_ttl}")
        if not self.snapshot_seconds >= 0:
            raise OptionError("snapshot_seconds", f"must not be negative, not {self.snapshot_seconds}")
        if not self.seal_seconds >= 0:
            raise OptionError("seal_seconds", f"must not be negative, not {self.seal_seconds}")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            one_gpu = name == "device" and re.fullmatch(r"cuda:\d+", str(value))
            if value not in allowed and not one_gpu:
                raise OptionError(name, f"must be one of {', '.join(allowed)}, not {value!r}")
        if self.journal is not None:
            if fault := fault_of(self.journal):
                raise OptionError("journal", fault)
            if not is_database(self.journal) and Path(self.journal).name in ("", ".."):
                raise OptionError("journal", f"must name a file, not {self.journal!r}")
        if self.tensor_parallel > 1 and re.fullmatch(r"cuda:\d+", self.device):
            raise OptionError(
                "device", f"{self.device} is one GPU, and tensor_parallel needs several: use cuda"
            )
        if self.draft is not None and not self.draft:
            raise OptionError("draft", "must name a model, not ''")
        if self.draft is not None and self.tensor_parallel > 1:
            raise OptionError("draft", "cannot be used with tensor_parallel: use one device, or no draft")
        if self.speculate == "mtp" and self.tensor_parallel > 1:
            raise OptionError(
                "speculate", "mtp cannot be used with tensor_parallel: use one device, or ngram"
            )
        if self.speculate == "mtp" and self.draft is not None:
            raise OptionError("speculate", "mtp cannot be used with draft: choose one of the two")
        if self.draft_tokens is not None and self.draft is None and self.speculate != "mtp":
            raise OptionError(
                "draft_tokens", "has no effect without draft: name a draft model as well, or speculate=mtp"
            )
        if self.disk is not None and not self.disk:
            raise OptionError("disk", "must name a directory, not ''")


@functools.cache
def _kinds() -> Mapping[str, Any]:
    """The type of each option."""
    return typing.get_type_hints(EngineOptions)


def require_kind(option: str, value: object, kind: Any) -> None:
    """Raise unless a value has the type of an option."""
    if not _fits(value, kind):
        allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        words = " or ".join(WORDS[typing.get_origin(one) or one] for one in allowed)
        raise OptionError(option, f"must be {words}, not {value!r}")


def _fits(value: object, kind: Any) -> bool:
    """Whether a value has a type; an int is a float as well, and a bool is neither."""
    origin = typing.get_origin(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    if origin is collections.abc.Mapping:
        of_keys, of_values = typing.get_args(kind)
        return isinstance(value, Mapping) and all(
            _fits(key, of_keys) and _fits(part, of_values) for key, part in value.items()
        )
    if origin is Literal:
        return isinstance(value, str)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def require_part(option: str, part: float) -> None:
    """Raise unless a number is a fraction: more than 0, at most 1."""
    if not 0.0 < part <= 1.0:
        raise OptionError(option, f"must be more than 0 and at most 1, not {part}")


def tenant_parts(options: EngineOptions) -> dict[str, float]:
    """The default fractions of each tier that a tenant may hold."""
    return {tier: getattr(options, f"tenant_{tier}") for tier in TIERS}


def check_context(options: EngineOptions, made_for: int, reach: int | None) -> None:
    """Raise if the context length is beyond the model's positions; warn if it is beyond its training length.

    A model was trained for `made_for` tokens; its positions end at `reach`, or have no limit if that is None.
    Random weights may be measured at any length.
    """
    asked = options.context_length
    if asked is None or asked <= made_for or options.load_format == "dummy":
        return
    if reach is not None and asked > reach:
        raise OptionError(
            "context_length", f"must be at most {reach}, the limit of the model's positions, not {asked}"
        )
    log.warning(
        "context_length %d is more than the %d tokens that the model was trained for", asked, made_for
    )


def make_options(**given: object) -> EngineOptions:
    """Options from keywords; an unknown one is an error that lists the options. Paths may be `Path`."""
    known = {field.name for field in fields(EngineOptions)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise OptionError(unknown[0], f"is not an option; the options are {', '.join(sorted(known))}")
    plain = {name: os.fspath(value) if isinstance(value, Path) else value for name, value in given.items()}
    return EngineOptions(**plain)  # type: ignore[arg-type]
