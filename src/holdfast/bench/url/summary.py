"""One load on a server through each of its APIs, and the figures of its samples."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from holdfast.bench.url.apis import ChatApi, SessionsApi
from holdfast.bench.url.load import Api, Load, Sample, percentile, run_load
from holdfast.client import Client, NotFound

__all__ = ["apis_of", "measure_api", "summarise"]

Figure = dict[str, Any]

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def apis_of(client: Client, api: str) -> tuple[str, ...]:
    """The names of the APIs to measure; `auto` is all that the server has."""
    if api != "auto":
        return (api,)
    try:
        client.sessions()
    except NotFound:
        return ("chat",)
    return ("sessions", "chat")


def measure_api(
    client: Client,
    name: str,
    model: str,
    api_key: str | None,
    load: Load,
    told: Callable[[Sample], None],
) -> Iterator[Figure]:
    """Run a load through one API and yield its figures; `told` is called with each turn as it ends."""

    async def run() -> tuple[list[Sample], float]:
        sessions = name == "sessions"
        api: Api = SessionsApi(client.url, api_key) if sessions else ChatApi(client.url, api_key, model)
        try:
            return await run_load(api, load, told)
        finally:
            await api.close()

    samples, seconds = asyncio.run(run())
    yield from summarise(samples, seconds, name, model, load)
    if name == "sessions":
        yield _figure("findings", len(client.memory()["findings"]), "findings", name, model, load)


def _figure(name: str, value: float, unit: str, api: str, model: str, load: Load, **more: object) -> Figure:
    return {"name": name, "value": value, "unit": unit, **more, **asdict(load), "model": model, "system": api}


def summarise(samples: list[Sample], seconds: float, api: str, model: str, load: Load) -> Iterator[Figure]:
    """The figures of the samples: percentiles in milliseconds, rates, aborted and failed turns."""
    good = [sample for sample in samples if sample.error is None]
    whole = [sample for sample in good if not sample.cut]
    late = [sample for sample in whole if sample.turn]
    timings = {
        "ttft": [sample.first for sample in good if sample.first is not None],
        "ttft_later_turns": [sample.first for sample in late if sample.first is not None],
        "inter_token": [sample.between for sample in whole if sample.between is not None],
        "turn": [sample.total for sample in whole],
    }
    for name, values in timings.items():
        if values:
            shares = {key: round(percentile(values, share) * 1e3, 3) for key, share in SHARES.items()}
            mean = round(statistics.fmean(values) * 1e3, 3)
            more = {**shares, "mean": mean, "max": round(max(values) * 1e3, 3), "count": len(values)}
            yield _figure(name, shares["p50"], "ms", api, model, load, **more)
    tokens = sum(sample.tokens for sample in good)
    yield _figure("throughput", round(tokens / seconds, 2), "tokens/s", api, model, load)
    yield _figure("turns", round(len(good) / seconds, 2), "turns/s", api, model, load)
    computed = sum(sample.prompt_tokens - sample.cached_tokens for sample in late)
    if late:
        yield _figure("prompt_computed", round(computed / len(late), 2), "tokens/turn", api, model, load)
    yield _figure("cut_short", sum(sample.cut for sample in good), "turns", api, model, load)
    yield _figure("errors", len(samples) - len(good), "turns", api, model, load)
