"""The storm on the CPU, with a small model: more sessions than fit, whose memory moves to the host and back.

    python -m holdfast.bench.cpu.storm
    python -m holdfast.bench.cpu.storm --layout hybrid --clients 14 --turns 200

Prints one JSON object (`bench/storm.py` says what is in it). The device has room for about twelve of the
forty sessions. Times say little on a CPU; the bytes and the counts are those of the same turns on a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from holdfast.bench.loops import open_loop, open_model
from holdfast.bench.small_models import SMALL_MODELS, saved_small_model
from holdfast.bench.storm import Storm, host_room, storm


def main() -> None:
    """Measure a small model, or one from a directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory of a model; a small random one if left out", type=Path)
    parser.add_argument("--layout", choices=sorted(SMALL_MODELS), default="dense")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--history", type=int, default=128)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=120)
    parser.add_argument("--device-tokens", type=int, default=1536)
    given = parser.parse_args()
    shape = Storm(given.sessions, given.history, given.clients, given.turns, said=8, answer=8)
    with saved_small_model(given.layout) as small:
        model = open_model(given.model or small, "cpu", "float32", dummy=False)
    options: dict[str, Any] = {
        "page_size": 16,
        "kv_tokens": given.device_tokens,
        "window_tokens": given.device_tokens,
        "state_slots": 4 * given.clients,
        "session_tokens": shape.tokens_max,
        "checkpoints": 0,
        "leave_history": False,
    }
    host, _ = host_room(model, shape, **options)
    figures = storm(open_loop(model, False, **options, host_memory=host), shape)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
