"""`holdfast sessions set` and `compact` on a running server."""

from pathlib import Path

from typer.testing import CliRunner, Result

from holdfast.cli.sessions import app
from holdfast.client import Client
from tests.client.serving import serving


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_sessions_of_a_server_are_set_and_compacted(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "echo") as url, Client(url) as client:
        at = ("--url", url)
        session = client.session(id="s")
        for said in ("one", "two", "three"):
            session.say(said).wait()
        changed = run("set", "s", "--pin", "--priority", "2", "--ttl", "50", "--drop-reasoning", *at)
        assert (changed.exit_code, changed.output) == (
            0,
            "s: ttl 50 s, pinned, priority 2, reasoning dropped\n",
        )
        changed = run("set", "s", "--no-pin", "--ttl", "0", *at)
        assert changed.output == "s: ttl 3600 s, not pinned, priority 2, reasoning dropped\n"
        done = run("compact", "s", "1", "2", "numbers", *at)
        assert done.exit_code == 0 and done.output.startswith("s: 2 turns left; the next turn computes ")
        view = session.view()
        assert (view.turns, view.priority) == (2, 2)
        assert f"computes {view.tokens_known - view.tokens_computed} tokens" in done.output
        assert run("set", "s", *at).exit_code != 0
        missing = run("set", "nobody", "--pin", *at)
        assert missing.exit_code == 1 and "no such session" in missing.output
        assert run("compact", "s", "2", "9", "numbers", *at).exit_code == 1
