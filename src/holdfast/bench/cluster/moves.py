"""How fast a session moves between two engines, and how long it holds up another one's tokens meanwhile.

The model is small and its keys and values are large, so that a session of a thousand tokens has hundreds of
megabytes. It goes to and fro between two engines at rest, and then while a session at each streams without
end.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

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

BESIDE_MAX = 2
"""Moves beside sessions that stream."""


class Speaker:
    """A session that streams without end, and notes when output came."""

    def __init__(self, client: httpx.AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self.times: list[float] = []

    async def talk(self) -> None:
        """Stream until cancelled."""
        turn = 0
        while True:
            body = {
                "input": list(tokens_of(1, turn, 8)),
                "stream": True,
                "sampling": {"max_tokens": 512, "ignore_eos": True, "temperature": 0.0},
            }
            path = f"/v1/sessions/{self._name}/turns"
            async with self._client.stream("POST", path, json=body) as answer:
                async for chunk in answer.aiter_raw():
                    self.times += [time.perf_counter()] * chunk.count(DELTA)
            await self._client.post(f"/v1/sessions/{self._name}/rewind", json={"to_turn": 0})
            turn += 1
            self.times.append(0.0)  # What lies between two turns is no pause.

    def pauses(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens in a stretch of time."""
        within = [each if begin <= each <= end else 0.0 for each in self.times]
        return [after - before for before, after in pairwise(within) if before and after]


async def _run(url: str, tokens: int, moves: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        names = await _place(client)
        moving = {"input": list(tokens_of(0, 0, tokens)), "sampling": {"max_tokens": 1, "temperature": 0.0}}
        (await client.post("/v1/sessions", json={"id": "moving"})).raise_for_status()
        (await client.post("/v1/sessions/moving/turns", json=moving)).raise_for_status()
        size, rates = await _moves(client, moves)
        speakers = [Speaker(client, name) for name in names]
        tasks = [asyncio.create_task(speaker.talk()) for speaker in speakers]
        await asyncio.sleep(2.0)
        quiet_end = time.perf_counter()
        _, beside = await _moves(client, BESIDE_MAX)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        usual = median(each for speaker in speakers for each in speaker.pauses(quiet_end - 1.5, quiet_end))
        longest = max(each for speaker in speakers for each in speaker.pauses(quiet_end, end))
        before = max(each for speaker in speakers for each in speaker.pauses(quiet_end - 1.5, quiet_end))
        return {
            "session_mb": size / 1e6,
            "move_mb_per_second": median(rates) / 1e6,
            "beside_steps_mb_per_second": median(beside) / 1e6,
            "step_ms": 1000 * usual,
            "longest_pause_steps": longest / usual,
            "longest_pause_without_moves_steps": before / usual,
        }


async def _moves(client: httpx.AsyncClient, moves: int) -> tuple[int, list[float]]:
    """Move the session to and fro: its bytes, and the bytes per second of each move."""
    size, rates = 0, []
    for _ in range(moves):
        home = (await client.get("/v1/sessions/moving")).json()["engine"]
        began = time.perf_counter()
        body = {"session": "moving", "engine": "e1" if home == "e0" else "e0"}
        answer = await client.post("/v1/cluster/move", json=body)
        answer.raise_for_status()
        size = answer.json()["bytes"]
        rates.append(size / (time.perf_counter() - began))
        turn = {"input": [7], "sampling": {"max_tokens": 1, "temperature": 0.0}}
        (await client.post("/v1/sessions/moving/turns", json=turn)).raise_for_status()
    return size, rates


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
