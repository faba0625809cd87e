"""A server with a draft model: the option, its metrics, its memory, and errors that name it."""

import time
from pathlib import Path

from tests.engine.tiny import write_model
from tests.preloaded import commands
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_observability import metrics


def settled_metrics(server: Server, pages: int) -> dict[str, float]:
    """The metrics, once a pulse of the engine has brought how many pages are held."""
    deadline = time.monotonic() + 60
    while (found := metrics(server)).get("holdfast_draft_pages_held") != pages:
        assert time.monotonic() < deadline, "no pulse"
        time.sleep(0.05)
    return found


def test_a_draft_model_is_served_and_measured(serve: Serve, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama", num_hidden_layers=12)
    draft = write_model(tmp_path / "draft", "llama", num_hidden_layers=1)
    common = ("--load-format", "dummy", "--kv-tokens", "4096", "--audit", "strict")
    server = serve(target, *common, "--draft", str(draft), "--draft-tokens", "1024")
    plain = serve(target, *common)
    sampling = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answers = [each.say(each.open("s"), "the river runs", sampling=sampling) for each in (server, plain)]
    assert answers[0]["usage"]["completion_tokens"] == 40
    assert answers[0]["text"] == answers[1]["text"]
    held = server.get("/v1/memory").json()["draft"]
    assert held["holders"]["SESSION"] > 0 and sum(held["holders"].values()) == held["units"] == 64
    measured = settled_metrics(server, held["holders"]["SESSION"])
    assert measured["holdfast_drafted_tokens_total"] > 0
    assert measured["holdfast_draft_pages_free"] == held["holders"]["FREE"]
    assert measured["holdfast_draft_sessions"] == 1
    assert measured["holdfast_draft_sessions_resting"] in (0, 1)
    assert not [name for name in metrics(plain) if name.startswith("holdfast_draft_")]
    assert "draft" not in plain.get("/v1/memory").json()
    server.close_all()
    assert server.get("/v1/memory").json()["draft"]["holders"]["SESSION"] == 0
    assert settled_metrics(server, 0)["holdfast_draft_sessions"] == 0


def test_a_draft_model_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama")
    hybrid = write_model(tmp_path / "hybrid", "bamba")
    start = ("serve", str(target), "--load-format", "dummy", "--port", "0")
    for given, problem in (
        (("--draft", str(hybrid)), "recurrent layers"),
        (("--draft", str(tmp_path / "nowhere")), "does not exist"),
        (("--draft", str(target), "--tensor-parallel", "2"), "--draft cannot be used with tensor_parallel"),
        (("--draft-tokens", "100"), "--draft"),
    ):
        ended = commands.run(*start, *given, text=True)
        assert ended.returncode != 0, given
        said = " ".join((ended.stderr + ended.stdout).replace("│", " ").split())
        assert "--draft" in said and problem in said, said
