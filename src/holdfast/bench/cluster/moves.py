"""How fast a session moves between two engines, and how long it holds up another one's tokens meanwhile.

The model is small and its keys and values are large, so that a session of a thousand tokens has hundreds of
megabytes. It goes to and fro between two engines at rest, and then while a session at each streams without
end. After each move its memory is restored, and it gets a turn.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from holdfast.bench.cluster.processes import Cluster
from holdfast.bench.models import VOCABULARY, write_model
from holdfast.bench.wire.client import DELTA
from holdfast.bench.wire.load import tokens_of

__all__ = ["measure_moves"]

CONFIGURATION: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
"""256 KiB of keys and values a token."""

BESIDE_MAX = 8
"""Moves beside sessions that stream."""

HISTORY, ANSWER = 256, 64
"""Tokens of a session that streams, and of one of its answers: steps take longer with a longer history, so
that an endless answer would have no usual step."""

QUIET_SECONDS, SETTLING_SECONDS = 6.0, 1.0
"""How long the sessions stream before that, and what of it is not counted."""


class Stretch(NamedTuple):
    """A stretch of time, in seconds."""

    begin: float
    end: float


class Speaker:
    """A session that streams without end, and notes when output came."""

    def __init__(self, client: httpx.AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self.times: list[float] = []

    async def talk(self) -> None:
        """Stream one answer after another to the same history, until cancelled."""
        path = f"/v1/sessions/{self._name}"
        sampling: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, "temperature": 0.0}
        history = {"input": list(tokens_of(1, 0, HISTORY)), "sampling": sampling}
        (await self._client.post(f"{path}/turns", json=history)).raise_for_status()
        turn = 1
        while True:
            asked = {"input": list(tokens_of(1, turn, 8)), "stream": True}
            body = {**asked, "sampling": {**sampling, "max_tokens": ANSWER}}
            async with self._client.stream("POST", f"{path}/turns", json=body) as answer:
                async for chunk in answer.aiter_raw():
                    self.times += [time.perf_counter()] * chunk.count(DELTA)
            (await self._client.post(f"{path}/rewind", json={"to_turn": 1})).raise_for_status()
            turn += 1
            self.times.append(0.0)  # What lies between two turns is no pause.

    def longest_pause(self, stretches: Iterable[Stretch]) -> float:
        """The longest time between two tokens that begins in one of some stretches of time, in seconds."""
        pauses = (after - before for stretch in stretches for before, after in self._pauses(stretch))
        return max(pauses, default=0.0)

    def usual_pause(self, stretch: Stretch) -> float:
        """The median of the times between two tokens."""
        return median(after - before for before, after in self._pauses(stretch))

    def _pauses(self, stretch: Stretch) -> Iterable[tuple[float, float]]:
        """Tokens that follow each other in a turn, the first of them in a stretch of time."""
        pairs = ((before, after) for before, after in pairwise(self.times) if before and after)
        return (pair for pair in pairs if stretch.begin <= pair[0] <= stretch.end)


class Moves:
    """A session that is moved to and fro between two engines."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.size = 0
        self.rates: list[float] = []
        """Bytes per second of each move."""
        self.moves: list[Stretch] = []
        self.restores: list[Stretch] = []
        """From the file that has come to the memory of the device."""
        self.turns: list[Stretch] = []
        """A token of the session's own: its step reads all of its memory, moved or not."""

    async def make(self, count: int) -> None:
        """Move the session so many times."""
        for _ in range(count):
            home = (await self._client.get("/v1/sessions/moving")).json()["engine"]
            body = {"session": "moving", "engine": "e1" if home == "e0" else "e0"}
            answer = await self._timed(self.moves, "/v1/cluster/move", body)
            self.size = answer["bytes"]
            self.rates.append(self.size / (self.moves[-1].end - self.moves[-1].begin))
            await self._timed(self.restores, "/v1/sessions/moving/restore", {})
            turn = {"input": [7], "sampling": {"max_tokens": 1, "temperature": 0.0}}
            await self._timed(self.turns, "/v1/sessions/moving/turns", turn)

    async def _timed(self, stretches: list[Stretch], path: str, body: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        answer = await self._client.post(path, json=body)
        answer.raise_for_status()
        stretches.append(Stretch(begin, time.perf_counter()))
        found: dict[str, Any] = answer.json()
        return found


async def _run(url: str, tokens: int, moves: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        names = await _place(client)
        moving = {"input": list(tokens_of(0, 0, tokens)), "sampling": {"max_tokens": 1, "temperature": 0.0}}
        (await client.post("/v1/sessions", json={"id": "moving"})).raise_for_status()
        (await client.post("/v1/sessions/moving/turns", json=moving)).raise_for_status()
        at_rest, beside = Moves(client), Moves(client)
        await at_rest.make(moves)
        speakers = [Speaker(client, name) for name in names]
        tasks = [asyncio.create_task(speaker.talk()) for speaker in speakers]
        await asyncio.sleep(QUIET_SECONDS)
        quiet = Stretch(time.perf_counter() - QUIET_SECONDS + SETTLING_SECONDS, time.perf_counter())
        await beside.make(BESIDE_MAX)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    step = median(speaker.usual_pause(quiet) for speaker in speakers)

    def longest(stretches: list[Stretch]) -> float:
        return max(speaker.longest_pause(stretches) for speaker in speakers) / step

    return {
        "session_mb": at_rest.size / 1e6,
        "move_mb_per_second": median(at_rest.rates) / 1e6,
        "beside_steps_mb_per_second": median(beside.rates) / 1e6,
        "step_ms": 1000 * step,
        "longest_pause_steps": longest(beside.moves),
        "longest_pause_in_a_restore_steps": longest(beside.restores),
        "longest_pause_in_the_turn_steps": longest(beside.turns),
        "longest_pause_without_moves_steps": longest([quiet]),
    }


async def _place(client: httpx.AsyncClient) -> list[str]:
    """Sessions that are at one engine each."""
    found: dict[str, str] = {}
    for number in range(16):
        name = f"speaking-{number}"
        (await client.post("/v1/sessions", json={"id": name})).raise_for_status()
        found.setdefault((await client.get(f"/v1/sessions/{name}")).json()["engine"], name)
        if len(found) == 2:
            break
    return list(found.values())


def measure_moves(journal: str, tokens: int, moves: int) -> dict[str, float]:
    """Move a session of so many tokens to and fro."""
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory(dir="/dev/shm") as disks:
        written = write_model(Path(model), CONFIGURATION)
        with Cluster() as cluster:
            options = ("--load-format", "dummy", "--journal", journal, "--kv-tokens", str(2 * tokens + 4096))
            engines = []
            for number in range(2):
                disk = Path(disks) / f"e{number}"
                disk.mkdir()
                own = ("--engine-id", f"e{number}", "--disk", str(disk))
                engines.append(cluster.engine(str(written), *own, *options))
            return asyncio.run(_run(cluster.api(engines).url, tokens, moves))
