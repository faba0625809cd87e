"""The stand-ins, and behind them the kit and the fixture of the checkout."""

import os
from pathlib import Path

__path__.append(str(Path(os.environ["SGLANG_CHECKOUT"]) / "python" / "sglang" / "test"))
