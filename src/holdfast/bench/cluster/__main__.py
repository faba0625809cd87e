"""Several engines and API processes on one machine: their cost, fail-over and moves.

    python -m holdfast.bench.cluster --part paths [--haproxy PROGRAM]
    python -m holdfast.bench.cluster --part scale
    python -m holdfast.bench.cluster --part failover --journal postgresql://… [--hang SECONDS]
    python -m holdfast.bench.cluster --part moves --journal postgresql://…

`paths`: the first token and processor time per token of an API process apart, and behind HAProxy, beside a
single server. `scale`: several engines beside one. `failover`: from `kill -9` of an engine to the next
acknowledged turn of its sessions, or from when it hangs. `moves`: bytes per second of a session that moves,
and the longest pause of others. What commits add is `python -m holdfast.bench.server.commits`. Client and
servers share the machine.
"""

from __future__ import annotations

import argparse
import json
import os

from holdfast.bench.cluster.failover import measure_failover
from holdfast.bench.cluster.moves import measure_moves
from holdfast.bench.cluster.paths import measure_paths, measure_scale

__all__ = ["main"]

PARTS = ("paths", "scale", "failover", "moves")
SHARED = ("failover", "moves")


def main() -> None:
    """Run one part, and print a line for each figure or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.bench.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--journal", help="an empty database: postgresql://user@host/db")
    parser.add_argument("--haproxy", help="the HAProxy program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument(
        "--hang", type=float, help="engines are stopped; links are lost after so many seconds"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of the session that moves")
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.part in SHARED and asked.journal is None:
        parser.error(f"--part {asked.part} needs --journal postgresql://…")
    found: dict[str, dict[str, float]]
    match asked.part:
        case "paths":
            found = measure_paths(asked.rounds, asked.haproxy)
        case "scale":
            found = measure_scale(asked.rounds, asked.replicas)
        case "failover":
            gaps = measure_failover(asked.journal, asked.sessions, asked.deaths, asked.hang)
            found = {"failover": gaps}
        case _:
            found = {"moves": measure_moves(asked.journal, asked.tokens, asked.moves)}
    for way, figures in found.items():
        if asked.json:
            print(json.dumps({"part": asked.part, "way": way, **figures}), flush=True)
            continue
        for name, value in figures.items():
            print(f"{way:<18} {name:<36} {value:10.3f}", flush=True)
    if not asked.json:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
