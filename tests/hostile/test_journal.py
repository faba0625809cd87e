"""Journals that were changed behind the server's back, or by another model: nobody is lost without a word."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken

from holdfast.engine.durable.journal_tables import row_checksum, turn_checksum
from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve, started
from tests.hostile.neighbours import engine_pid
from tests.models.small import END, VOCABULARY, build_small_model, small_encoder, write_small_model
from tests.preloaded.commands import run
from tests.server.serving import Server

pytestmark = pytest.mark.soak

SAID = re.compile(r"damage|missing|lost|incomplete|torn|corrupt", re.IGNORECASE)
"""How a log says that something is not there any more."""

ADDED = 64


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def write_larger_model(directory: Path) -> Path:
    """The small model with tokens added to its vocabulary, as fine-tuning does it."""
    write_small_model(directory)
    built = build_small_model("llama")
    built.resize_token_embeddings(VOCABULARY + ADDED, mean_resizing=False)
    built.generation_config = transformers.GenerationConfig(eos_token_id=END, pad_token_id=2)
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    built.save_pretrained(directory)
    encoder = small_encoder()
    encoder.add_special_tokens([AddedToken(f"<|extra_{number}|>", special=True) for number in range(ADDED)])
    encoder.save(str(directory / "tokenizer.json"))
    return directory


def starts(model: Path, journal: Path) -> subprocess.CompletedProcess[str] | None:
    """What a server says that refuses a journal; None if it does not end by itself."""
    arguments = ["serve", str(model), "--port", "0", "--journal", str(journal), "--kv-tokens", "4096"]
    try:
        return run(*arguments, text=True, timeout=demands.ANSWER_SECONDS / 4)
    except subprocess.TimeoutExpired:
        return None


def refused_cleanly(ended: subprocess.CompletedProcess[str]) -> bool:
    """Whether a server has said in one line that it cannot use a journal."""
    last = ended.stderr.strip().splitlines()[-1]
    return (
        ended.returncode in demands.ENDS_WITH
        and last.startswith("holdfast serve: ")
        and "journal" in last
        and "Traceback" not in ended.stderr
    )


def goes_on_or_refuses(server: Server, session: str) -> None:
    """The next turn of a session is answered or refused, and the engine lives through it."""
    engine = engine_pid(server)
    found = server.get(f"/v1/sessions/{session}")
    if found.status_code == 200:
        answer = server.post(f"/v1/sessions/{session}/turns", {"input": "bak", "sampling": {"max_tokens": 4}})
        assert answer.status_code == 200 or demands.refused(answer.status_code), answer.text
    else:
        assert demands.refused(found.status_code)
    assert engine_pid(server) == engine, "the engine was started again"
    assert server.say(server.open(), "bak", sampling={"max_tokens": 4})["token_ids"]
    assert not any("Traceback" in line or "starting it again" in line for line in server.lines)


def test_a_journal_of_a_model_with_more_tokens_kills_no_engine(
    serve: Serve, tmp_path: Path, small_llama: Path, journal: Path
) -> None:
    larger = write_larger_model(tmp_path / "larger")
    server = serve(larger, "--journal", str(journal), "--kv-tokens", "4096")
    server.open("s")
    server.say("s", list(range(VOCABULARY, VOCABULARY + ADDED)), sampling={"max_tokens": 4})
    assert server.stop() == 0
    ended = starts(small_llama, journal)
    if ended is None:
        goes_on_or_refuses(serve(small_llama, "--journal", str(journal), "--kv-tokens", "4096"), "s")
    else:
        assert refused_cleanly(ended), ended.stderr


def forge(path: Path, tokens: list[int]) -> None:
    """Put token ids into the last turn of every session, with sums that are right."""
    said = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    with closing(sqlite3.connect(path)) as connection, connection:
        for name, head, origin in connection.execute("SELECT id, head, origin FROM sessions").fetchall():
            row = connection.execute(
                "SELECT before, turn_id, input, finish, "
                "(SELECT checksum FROM turns o WHERE o.number = t.before) FROM turns t WHERE number = ?",
                (head,),
            ).fetchone()
            before, turn_id, said_in, finish, sum_before = row
            found = turn_checksum(origin if before is None else sum_before, turn_id, said_in, said, finish)
            connection.execute(
                "UPDATE turns SET output = ?, checksum = ? WHERE number = ?", (said, found, head)
            )
            connection.execute(
                "UPDATE sessions SET head_sum = ? WHERE id = ?", (row_checksum(name, found), name)
            )
            connection.execute("DELETE FROM finished")


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 1, 1 << 20, (1 << 31) - 1, -1])
def test_a_row_with_a_token_beyond_the_vocabulary_kills_no_engine(
    serve: Serve, small_llama: Path, journal: Path, token: int
) -> None:
    arguments = ("--journal", str(journal), "--kv-tokens", "4096")
    server = serve(small_llama, *arguments)
    server.open("s")
    server.say("s", "bak del", sampling={"max_tokens": 4})
    assert server.stop() == 0
    forge(journal, [300, token, 301])
    server = serve(small_llama, *arguments)
    goes_on_or_refuses(server, "s")


# --- the write-ahead log ------------------------------------------------------------------------------


def _flip(wal: bytearray, place: float) -> bytearray:
    wal[int(len(wal) * place)] ^= 0x10
    return wal


DAMAGES: dict[str, Callable[[bytearray], bytearray]] = {
    "a bit in the first quarter": lambda wal: _flip(wal, 0.25),
    "a bit in the middle": lambda wal: _flip(wal, 0.5),
    "a bit near the end": lambda wal: _flip(wal, 0.9),
    "the second half": lambda wal: wal[: len(wal) // 2],
    "all but its head": lambda wal: wal[:32],
    "all of it": lambda wal: bytearray(),
    "zeros in the middle": lambda wal: wal[: len(wal) // 2] + bytes(4096) + wal[len(wal) // 2 + 4096 :],
}
TURNS = 30


@pytest.fixture(scope="module")
def killed_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a server that was killed, with acknowledged turns in the write-ahead log."""
    journal = tmp_path_factory.mktemp("killed") / "journal.db"
    server = Server("echo", *ROOM, "--journal", str(journal))
    server.open("s")
    for number in range(TURNS):
        server.say("s", f"word {number}", turn_id=f"t-{number}")
    engine = engine_pid(server)
    os.kill(server.process.pid, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)
    server.process.wait()
    server.http.close()
    server._reader.join(10)
    assert server.process.stdout is not None
    server.process.stdout.close()
    assert journal.with_name("journal.db-wal").stat().st_size > 50_000
    return journal.parent


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_damage_in_the_write_ahead_log_is_said(
    serve: Serve, killed_journal: Path, tmp_path: Path, damage: str | None
) -> None:
    """Acknowledged turns that are gone are missed: the server says so, or does not start."""
    copied = tmp_path / "copied"
    shutil.copytree(killed_journal, copied)
    wal = copied / "journal.db-wal"
    if damage is not None:
        wal.write_bytes(DAMAGES[damage](bytearray(wal.read_bytes())))
    server = started(serve, "echo", *ROOM, "--journal", str(copied / "journal.db"))
    if isinstance(server, str):
        assert "journal" in server and SAID.search(server), server
        assert "Traceback" not in server and damage is not None
        return
    found = server.get("/v1/sessions/s")
    turns = found.json()["turns"] if found.status_code == 200 else 0
    said = [line for line in server.lines if SAID.search(line)]
    if damage is None:
        assert turns == TURNS and not said
    else:
        assert turns == TURNS or said, f"{TURNS - turns} acknowledged turns are gone without a word"
    assert not any("Traceback" in line for line in server.lines)
