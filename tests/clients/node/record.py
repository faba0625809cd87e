"""Records clients of Node: requests and the forms of answers, which `tests/server/test_recorded.py` replays.

Run by hand, with the interpreter of the clients' environment, against a server that says what it was told:

    holdfast serve echo --tool-parser hermes --reasoning-parser think --context-length 131072
    .venv-clients/node/bin/python -m tests.clients.node.record http://127.0.0.1:8000 FOLDER [NAME…]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clients.exchanges import Proxy, scrubbed
from tests.clients.node.running import PACKAGES, calling, run_script
from tests.clients.node.test_claude_code import Claude
from tests.clients.node.test_codex import ALONE, FIRST, Codex
from tests.clients.node.test_opencode import FIRST as OPENCODE_FIRST
from tests.clients.node.test_opencode import Opencode
from tests.clients.node.test_qwen_code import FIRST as QWEN_FIRST
from tests.clients.node.test_qwen_code import Qwen
from tests.server.recorded_forms import form_of, ids_of

MARKS = {"x" * 4000: "(long)"}


def run_codex(url: str) -> None:
    """Two rounds of tools, and a second turn."""
    with tempfile.TemporaryDirectory() as home:
        codex = Codex(Path(home))
        codex.configure(url)
        codex.run(*ALONE, FIRST)
        codex.run("resume", "--last", *ALONE, "again")


def run_claude(url: str) -> None:
    """The same."""
    with tempfile.TemporaryDirectory() as home:
        claude = Claude(Path(home))
        claude.run(url, "-p", calling("Bash", command="cat next.txt"))
        claude.run(url, "-c", "-p", "again")


def run_opencode(url: str) -> None:
    """The same."""
    with tempfile.TemporaryDirectory() as home:
        opencode = Opencode(Path(home))
        opencode.configure(url)
        opencode.run(OPENCODE_FIRST)
        opencode.run("again", "--continue")


def run_qwen(url: str) -> None:
    """The same."""
    with tempfile.TemporaryDirectory() as home:
        qwen = Qwen(Path(home))
        qwen.run(url, QWEN_FIRST)
        qwen.run(url, "--continue", "again")


def version(package: str) -> str:
    """The name of a recording: the package and its version."""
    found: str = json.loads((PACKAGES / package / "package.json").read_text())["version"]
    return f"{package.removeprefix('@').replace('/', '-')}-{found}"


def scripted(*arguments: str) -> Callable[[str], None]:
    """Runs the story of a script."""

    def run(url: str) -> None:
        run_script(*arguments, url, "story")

    return run


def clients() -> dict[str, Callable[[str], None]]:
    """The clients by the names of their recordings."""
    return {
        f"{version('@ai-sdk/openai')}-responses": scripted("ai_sdk.mjs", "responses"),
        f"{version('@ai-sdk/openai')}-chat": scripted("ai_sdk.mjs", "chat"),
        version("@ai-sdk/openai-compatible"): scripted("ai_sdk.mjs", "compatible"),
        version("@ai-sdk/anthropic"): scripted("ai_sdk.mjs", "anthropic"),
        f"{version('openai')}-chat": scripted("openai.mjs", "chat"),
        f"{version('openai')}-responses": scripted("openai.mjs", "responses"),
        version("@anthropic-ai/sdk"): scripted("anthropic.mjs"),
        version("@openai/codex"): run_codex,
        version("@anthropic-ai/claude-code"): run_claude,
        version("opencode-ai"): run_opencode,
        version("@qwen-code/qwen-code"): run_qwen,
    }


def shown(exchange: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """An exchange as it is kept."""
    answer = exchange["answer"]
    kept = {name: exchange[name] for name in ("path", "headers", "request", "status")}
    text = json.dumps({**kept, "ids": ids_of(answer), "form": form_of(answer)})
    for long, mark in MARKS.items():
        text = text.replace(long, mark)
    cleaned: dict[str, Any] = scrubbed(json.loads(text), words)
    return cleaned


def main() -> None:
    """Record each client into a file of its own; further arguments are beginnings of the names wanted."""
    server, folder, wanted = sys.argv[1], Path(sys.argv[2]), tuple(sys.argv[3:]) or ("",)
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in clients().items():
        if not name.startswith(wanted):
            continue
        proxy = Proxy(server)
        try:
            run(proxy.url)
        finally:
            proxy.close()
        words: dict[str, str] = {}
        kept = [shown(each, words) for each in proxy.kept if each["method"] == "POST"]
        path = folder / f"{name}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(path, len(kept))


if __name__ == "__main__":
    main()
