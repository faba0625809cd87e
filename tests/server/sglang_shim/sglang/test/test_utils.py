"""Starts Holdfast where the suites start their server, and looks at its ledger before it ends.

The suites' options are translated; those without a counterpart are left out. Where they force retractions,
the server gets a small pool, so that turns must be taken back. Every server counts strictly.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request

from sglang.srt.environ import envs

DEFAULT_SMALL_MODEL_NAME_FOR_TEST = os.environ.get("HOLDFAST_SUITE_MODEL", "smollm2")
SERVED = {"openai/gpt-oss-20b": os.environ.get("HOLDFAST_SUITE_WINDOW_MODEL", "")}
"""What is served in place of models that the suites name themselves: here one with sliding windows."""
DEFAULT_TARGET_MODEL_EAGLE3 = DEFAULT_SMALL_MODEL_NAME_FOR_TEST
DEFAULT_DRAFT_MODEL_EAGLE3 = "none"
DEFAULT_URL_FOR_TEST = os.environ.get("HOLDFAST_SUITE_URL", "http://127.0.0.1:8463")
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 180

TRANSLATED = {
    "--chunked-prefill-size": "--chunk-tokens",
    "--context-length": "--context-length",
    "--page-size": "--page-size",
    "--max-running-requests": "--max-running",
    "--log-level": "--log-level",
}
RETRACTING_TOKENS = "6144"
"""A pool in which the suites' concurrent sessions do not all fit."""

COUNTED = ("holdfast_retracts_total", "holdfast_dropped_total", "holdfast_spills_total")

_started: dict[int, "subprocess.Popen[bytes]"] = {}


class CustomTestCase(unittest.TestCase):
    """The suites' base class."""


def served_model(model: str) -> str:
    """What stands in for a model; without anything, the suite does not apply."""
    served = model if model == DEFAULT_SMALL_MODEL_NAME_FOR_TEST else SERVED.get(model)
    if not served:
        raise unittest.SkipTest(f"needs the model {model}, or one in its place")
    return served


def popen_launch_server(
    model: str, base_url: str, timeout: float, other_args: list[str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a server and wait until it takes turns."""
    served = served_model(model)
    given = [each for argument in other_args or [] for each in argument.split("=", 1)]
    arguments = ["--port", base_url.rpartition(":")[2], "--audit", "strict"]
    for name, value in itertools.pairwise(given):
        if name in TRANSLATED:
            arguments += [TRANSLATED[name], value]
    if "--speculative-algorithm" in given and _can_speculate():
        arguments += ["--speculate", "ngram"]
    if envs.SGLANG_TEST_RETRACT.value:
        arguments += ["--kv-tokens", RETRACTING_TOKENS]
    else:
        arguments += ["--kv-tokens", "131072"]
    arguments += os.environ.get("HOLDFAST_SUITE_OPTIONS", "").split()
    process = subprocess.Popen([sys.executable, "-m", "holdfast.cli", "serve", served, *arguments])
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: serve {served} {arguments}")
        try:
            with urllib.request.urlopen(base_url + "/health/ready", timeout=5):
                _started[process.pid] = process
                return process
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    process.kill()
    raise RuntimeError("the server did not come up")


def _can_speculate() -> bool:
    """Whether this server drafts tokens; the suites' own draft model is never there."""
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--help"]
    return "--speculate" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def end_by_pid(pid: int) -> None:
    """End a server that was started here."""
    terminate_and_kill_process_tree(_started[pid])


def terminate_and_kill_process_tree(process: "subprocess.Popen[bytes]", wait_timeout: float = 60) -> None:
    """Look at the ledger, then end the server; both must be as they should."""
    try:
        check_ledger()
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(wait_timeout)
        del _started[process.pid]
    if status:
        raise RuntimeError(f"the server ended with {status}")


def check_ledger(seconds: float = 20) -> None:
    """No finding, and nothing is held by turns or sessions any more."""
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(DEFAULT_URL_FOR_TEST + "/v1/memory", timeout=30) as answer:
            memory = json.load(answer)
        with urllib.request.urlopen(DEFAULT_URL_FOR_TEST + "/metrics", timeout=30) as answer:
            figures = answer.read().decode()
        moved = [line for line in figures.splitlines() if line.startswith(COUNTED)]
        held = {
            f"{pool['component']} {kind}": units
            for pool in memory["pools"]
            for kind, units in pool["holders"].items()
            if units and kind not in ("FREE", "TREE")
        }
        if memory["findings"] or not held or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    print(f"ledger: findings {memory['findings']}, held {held}, steps {memory['step']}, {moved}")
    if memory["findings"] or held:
        raise AssertionError(f"findings {memory['findings']}, held {held}")
