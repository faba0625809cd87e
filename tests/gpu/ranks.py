"""Tensor parallelism on a machine with one GPU: what can be checked there.

    PYTHONPATH=src python3 -m tests.gpu.ranks              # tokens, then times
    PYTHONPATH=src python3 -m tests.gpu.ranks --checks     # tokens alone
    PYTHONPATH=src python3 -m tests.gpu.ranks --times

Two ranks share the GPU, and their sums pass through main memory (gloo), without CUDA graphs: NCCL does not
take two ranks on one GPU. One rank runs the same code in CUDA graphs, alone and summing over itself with
NCCL. All must generate the tokens of a model without ranks. The times of one rank are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from holdfast.bench.loops import NoTokenizer, Talk, capture_graphs, open_loop, open_model
from holdfast.bench.small_models import SMALL_MODELS, saved_small_model
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.ranks import crew, follower
from holdfast.engine.ranks.group import RankGroup, join_gloo, join_nccl
from holdfast.engine.start.assembly import build_loop
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.generation import GenerationDefaults
from holdfast.models.ranks import Ranks
from tests.gpu.tokens import conversation

GPU = torch.device("cuda", 0)
MEETINGS = TemporaryDirectory()
"""Where ranks meet: NCCL's threads look into it as long as a group exists."""
WITHOUT, ALONE, OVER_NCCL = WAYS = ("without ranks", "one rank", "one rank that sums over itself with NCCL")
SIZES: dict[str, Any] = {
    "page_size": 16,
    "kv_tokens": 2048,
    "window_tokens": 2048,
    "state_slots": 48,
    "audit": "strict",
    "chunk_tokens": 16,
    "step_tokens": 512,
    "max_running": 8,
    "host_memory": 16 << 20,
}


def through_memory(meeting: Path, ranks: Ranks, seconds: float, _: torch.device) -> RankGroup:
    """Join over gloo, whatever the device."""
    return join_gloo(meeting, ranks, seconds)


def spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """A rank that joins over gloo."""
    command = [sys.executable, "-m", "tests.gpu.ranks", str(descriptor)]
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)


def two_ranks(path: Path, overlap: bool) -> list[int]:
    """The conversation of two ranks on one GPU."""
    crew.spawn, crew.join = spawn, through_memory
    options = make_options(device="cuda", dtype="float32", tensor_parallel=2, overlap=overlap, **SIZES)
    others = crew.Crew.start(str(path), options, [GPU, GPU])
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, choose_placement(checkpoint, GPU, "float32"), group=others.group)
    others.loaded()
    loop = build_loop(model, NoTokenizer(), GenerationDefaults(), options, runner=others)  # type: ignore[arg-type]
    said = conversation(loop, 128)
    loop.shut_down()
    loop.end_ranks()
    return said


def one_rank(path: Path, dtype: str, way: str, **options: Any) -> EngineLoop:
    """A loop with CUDA graphs, of a model in one of three `WAYS`."""
    if way == WITHOUT:
        return open_loop(open_model(path, "cuda", dtype, dummy=dtype != "float32"), True, **options)
    checkpoint = open_checkpoint(path)
    meeting = Path(mkdtemp(dir=MEETINGS.name)) / "meeting"
    group = join_nccl(meeting, Ranks(0, 1), 60.0, GPU, alone_too=way == OVER_NCCL)
    format_ = "auto" if dtype == "float32" else "dummy"
    placement = choose_placement(checkpoint, GPU, dtype)
    model = load_model(checkpoint, placement, load_format=format_, group=group)  # type: ignore[arg-type]
    loop = open_loop(model, False, **options)
    capture_graphs(loop)
    return loop


def step_seconds(loop: EngineLoop, rows: int) -> float:
    """The median time of a decode step of some rows."""
    talks = [Talk(loop, f"{rows} rows: {number}") for number in range(rows)]
    for number, talk in enumerate(talks):
        talk.begin([(number + 5 * place) % 128 for place in range(32)], 260)
    while any(len(talk.said) < 20 for talk in talks):
        loop.step()
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def write_shape(folder: Path) -> Path:
    """The shape of an 8B model, with random weights."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def check() -> int:
    """Compare the tokens of every way; returns how many differ."""
    wrong = 0
    for name in SMALL_MODELS:
        with saved_small_model(name) as path:
            for overlap in (False, True):
                alone = open_loop(
                    open_model(path, "cuda", "float32", dummy=False), False, overlap=overlap, **SIZES
                )
                expected = conversation(alone, 128)
                found = {"two ranks over gloo": two_ranks(path, overlap)}
                for way in (ALONE, OVER_NCCL):
                    loop = one_rank(path, "float32", way, overlap=overlap, **SIZES)
                    found[way] = conversation(loop, 128)
                for way, said in found.items():
                    wrong += said != expected
                    line = {"check": f"{name}, overlap {overlap}, {way}", "same": said == expected}
                    print(json.dumps(line), flush=True)
    return wrong


def time_steps() -> None:
    """Print the times of one rank's decode steps, in turn with those without ranks."""
    with TemporaryDirectory() as folder:
        path = write_shape(Path(folder))
        for way in WAYS * 3:
            loop = one_rank(path, "bfloat16", way, kv_tokens=32_768, max_running=16, overlap=True)
            times = {rows: round(step_seconds(loop, rows) * 1e6) for rows in (1, 16)}
            print(json.dumps({"an 8B shape": way, "microseconds by rows": times}), flush=True)
            del loop
            torch.cuda.empty_cache()


def main() -> int:
    """Check, and time; or be one of the two ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("descriptor", nargs="?", type=int, help="of the socket to rank 0, in another rank")
    parser.add_argument("--checks", action="store_true", help="time nothing")
    parser.add_argument("--times", action="store_true", help="check nothing")
    given = parser.parse_args()
    if given.descriptor is not None:
        follower.join = through_memory
        return follower.main(given.descriptor)
    wrong = 0 if given.times else check()
    if not given.checks:
        time_steps()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
