"""The engine process of a replica: its start, its heartbeats, its ends. Real processes, without Ray."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cluster.autoscaling import Load
from holdfast.replicas.engine_runner import EngineCommand, EngineNotStarted, EngineRunner
from holdfast.server.link.tls import write_keys


def command(keys: Path, *arguments: str) -> EngineCommand:
    return EngineCommand("127.0.0.1", str(keys), arguments, {"OMP_NUM_THREADS": "1"}, 5.0, 2.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    made = tmp_path / "link.pem"
    write_keys(made)
    return made


async def told(runner: EngineRunner) -> Load:
    """Its load, once it has said it."""
    while (load := runner.load()) is None:
        await asyncio.sleep(0.01)
    return load


def test_an_engine_lives_and_drains(keys: Path) -> None:
    async def main() -> None:
        runner = EngineRunner(command(keys, "echo", "--kv-tokens", "4096"), "engine-7")
        assert runner.problem() == "engine-7 has not started"
        assert await runner.drain() is None
        await runner.start()
        async with asyncio.timeout(120):
            assert await told(runner) == Load(1.0)
        assert runner.problem() is None
        assert runner.address.startswith("127.0.0.1:")
        arguments = Path(f"/proc/{runner.process_id}/cmdline").read_text().split("\0")
        assert "engine-7" in arguments
        assert await runner.drain() == 0
        assert runner.problem() == "engine-7 ended with status 0"

    asyncio.run(main())


def test_a_dead_engine_and_one_that_is_silent(keys: Path) -> None:
    async def main() -> None:
        runner = EngineRunner(command(keys, "echo"), "engine-0")
        await runner.start()
        async with asyncio.timeout(120):
            await told(runner)
            assert runner.process_id is not None
            os.kill(runner.process_id, signal.SIGSTOP)
            while runner.problem() is None:
                await asyncio.sleep(0.01)
            assert runner.problem() == "engine-0 gives no sign of life"
            os.kill(runner.process_id, signal.SIGCONT)
            while runner.problem() is not None:
                await asyncio.sleep(0.01)
            os.kill(runner.process_id, signal.SIGKILL)
            assert await runner.ended() == -signal.SIGKILL
            assert runner.problem() == f"engine-0 ended with status {-signal.SIGKILL}"
            before = runner.process_id
            await runner.restart()
            await told(runner)
            assert (runner.problem(), runner.process_id != before) == (None, True)
        await runner.close()

    asyncio.run(main())


def test_an_engine_that_cannot_start_says_why(keys: Path, tmp_path: Path) -> None:
    async def main() -> None:
        runner = EngineRunner(command(keys, str(tmp_path / "no-model")), "engine-0")
        with pytest.raises(
            EngineNotStarted, match=r"engine-0 ended with status 2: holdfast engine: .*no-model"
        ):
            await runner.start()
        await runner.close()

    asyncio.run(main())


LOUD = """
print("x" * 300_000)
print("Holdfast engine e0 listens on 10.0.0.1:7000", flush=True)
for _ in range(100):
    print("y" * 70_000)
print("the end", end="")
"""


def test_lines_of_any_length_do_not_stop_an_engine(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        runner = EngineRunner(command(keys, "echo"), "engine-0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOUD), stdout=asyncio.subprocess.PIPE
        )
        listens: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(120):
            await runner._read(process, listens)
        assert (await listens, process.returncode) == ("10.0.0.1:7000", 0)

    asyncio.run(main())
    passed_on = capsys.readouterr().err
    assert passed_on.count("x") == 300_000 and passed_on.count("y") == 7_000_000
    assert passed_on.endswith("engine-0: the end\n")


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-m", "holdfast.cli.child", str(os.getpid()), "engine", "echo", *sys.argv[1:]],
    stdout=subprocess.PIPE, text=True,
)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_an_engine_does_not_outlive_its_replica(keys: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "--listen", "127.0.0.1:0", "--link-keys", str(keys)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert "listens on" in line
    parent.kill()
    parent.wait()
    parent.stdout.close()
    stat = Path(f"/proc/{line.split()[0]}/stat")
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


def test_a_child_without_its_parent_does_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.child", "1", "version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "has ended" in run.stderr
