"""Writes the directory of a shape, for commands that take `--load-format dummy`.

    python -m holdfast.bench.gpu.write_shape qwen3-8b DIRECTORY

The configuration is the shape's; the vocabulary and the chat template are made up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.bench.gpu.shapes import SHAPES
from holdfast.bench.models import write_model


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args()
    print(write_model(chosen.directory, SHAPES[chosen.shape]))


if __name__ == "__main__":
    main()
