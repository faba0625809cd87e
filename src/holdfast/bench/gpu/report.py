"""The output of `python -m holdfast.bench.gpu`: one JSON object a line, beside SGLang's figure.

SGLang 0.5.12.post1 was measured on an H200 with the same shapes and lengths.
"""

from __future__ import annotations

import json

__all__ = ["note", "report"]

# (model, measure): SGLang's figure and the aim. Milliseconds where less is better, else tokens a second.
ANCHORS: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("qwen3-8b", "decode 1"): (5.09, 4.7),
    ("qwen3-8b", "decode 16"): (5.34, 4.9),
    ("qwen3-8b", "decode 64"): (6.34, 5.8),
    ("qwen3-8b", "decode 256"): (12.0, 11.0),
    ("qwen3-8b", "turn 1024"): (20.5, 7.0),
    ("qwen3-8b", "turn 8192"): (21.2, 7.0),
    ("qwen3-8b", "turn 32768"): (22.9, 9.0),
    ("qwen3-8b", "turn after abort 1024"): (37.5, None),
    ("qwen3-8b", "turn after abort 8192"): (224.0, None),
    ("qwen3-8b", "turn after abort 32768"): (1279.0, 9.9),
    ("qwen3-8b", "64 sessions tokens/s"): (5816.0, 7500.0),
    ("qwen3-8b", "64 sessions first token median"): (66.5, None),
    ("qwen3-8b", "64 sessions first token p90"): (85.6, None),
    ("qwen3-8b", "prefill 1 x 8192"): (37287.0, 33558.0),
    ("qwen3-8b", "prefill 16 x 2048"): (41752.0, 37577.0),
    ("qwen3-8b", "turn after a spill 32768"): (None, 115.0),
    ("qwen3-8b", "storm turns/s"): (None, 40.0),
    ("qwen3-8b", "storm first token median"): (None, 2000.0),
    ("nemotron-h-8b", "storm turns/s"): (None, 120.0),
    ("nemotron-h-8b", "decode 1"): (5.82, 4.8),
    ("nemotron-h-8b", "decode 16"): (7.54, 5.8),
    ("nemotron-h-8b", "decode 64"): (11.4, 9.0),
    ("nemotron-h-8b", "decode 256"): (35.4, 25.0),
    ("nemotron-h-8b", "turn 1024"): (37.1, 9.0),
    ("nemotron-h-8b", "turn 8192"): (35.6, 9.0),
    ("nemotron-h-8b", "turn 32768"): (44.1, 10.0),
    ("nemotron-h-8b", "turn after abort 1024"): (96.0, None),
    ("nemotron-h-8b", "turn after abort 8192"): (352.0, None),
    ("nemotron-h-8b", "turn after abort 32768"): (1394.0, 11.0),
    ("nemotron-h-8b", "64 sessions tokens/s"): (2813.0, 5600.0),
    ("nemotron-h-8b", "64 sessions first token median"): (235.0, None),
    ("nemotron-h-8b", "64 sessions first token p90"): (931.0, None),
    ("nemotron-h-8b", "prefill 1 x 8192"): (25900.0, 25900.0),
    ("nemotron-h-8b", "prefill 16 x 2048"): (25822.0, 25822.0),
}


def report(**figure: object) -> None:
    """Print one JSON object."""
    print(json.dumps(figure), flush=True)


def note(model: str, measure: str, value: float, unit: str, floor: float | None = None) -> None:
    """Print a figure with its roofline, SGLang's figure, their ratio (above 1 is better) and the target."""
    anchor, aim = ANCHORS.get((model, measure), (None, None))
    figure: dict[str, object] = {"model": model, "measure": measure, "value": round(value, 3), "unit": unit}
    if floor is not None:
        figure["roofline"] = round(floor, 3)
    if anchor is not None:
        figure |= {"anchor": anchor, "ratio": round(anchor / value if unit == "ms" else value / anchor, 2)}
    if aim is not None:
        figure |= {"aim": aim, "reached": value <= aim if unit == "ms" else value >= aim}
    report(**figure)
