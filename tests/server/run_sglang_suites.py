"""Runs SGLang's own suites of sessions against Holdfast, from a checkout of SGLang.

    python tests/server/run_sglang_suites.py CHECKOUT [--model MODEL] [--endless] [-k PATTERN]

The suites are run as they are; what they import of SGLang's is stood in for by `sglang_shim`, which starts
`holdfast serve` with a strict audit and looks at the ledger before each server ends. They need aiohttp,
requests and tabulate, which Holdfast does not: `pip install --target DIR aiohttp requests tabulate`, then
`PYTHONPATH=DIR`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import GGUFReader

from holdfast.engine.start.pull import resolve_model

HERE = Path(__file__).resolve().parent
SUITES = (
    "test_session_control",
    "test_streaming_session",
    "test_streaming_session_extra",
    "test_streaming_session_swa",
    "test_streaming_session_swa_extra",
    "test_session_latency",
)


def without_end(model: str, folder: Path) -> Path:
    """A copy of a GGUF model whose answers do not end early: its end mark is its first token."""
    copy = folder / f"endless-{Path(model).name}.gguf"
    shutil.copyfile(resolve_model(model), copy)
    GGUFReader(copy, "r+").fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = 0
    return copy


def main() -> int:
    """Run the suites one after another; 0 if all that apply pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="where SGLang is checked out")
    parser.add_argument("-k", action="append", default=[], help="only tests whose names match")
    parser.add_argument("--model", default="smollm2", help="what is served")
    parser.add_argument("--window-model", default="", help="served to suites that want sliding windows")
    parser.add_argument("--endless", action="store_true", help="serve a copy whose answers do not end early")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only these suites")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.endless:
            arguments.model = str(without_end(arguments.model, Path(folder)))
        return run(parser, arguments)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run what was chosen."""
    sessions = arguments.checkout.resolve() / "test" / "registered" / "sessions"
    if not sessions.is_dir():
        parser.error(f"there are no suites of sessions in {arguments.checkout}")
    paths = [str(HERE / "sglang_shim"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_CHECKOUT": str(arguments.checkout.resolve()),
        "HOLDFAST_SUITE_MODEL": arguments.model,
        "HOLDFAST_SUITE_WINDOW_MODEL": arguments.window_model,
    }
    chosen = [each for pattern in arguments.k for each in ("-k", pattern)]
    failed = []
    for suite in arguments.suite or SUITES:
        print(f"=== {suite}", flush=True)
        command = [sys.executable, "-m", "unittest", "-v", *chosen, suite]
        if subprocess.run(command, cwd=sessions, env=environment, check=False).returncode:
            failed.append(suite)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
