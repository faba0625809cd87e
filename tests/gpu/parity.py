"""Every family on the GPU against transformers, in float32 and in bfloat16, with the strict audit on.

    PYTHONPATH=src python3 -m tests.gpu.parity                 # all families
    PYTHONPATH=src python3 -m tests.gpu.parity llama bamba

Small random models as in the parity tests, and two that are large enough for the CUDA kernels. The reference
is transformers on the CPU in float32:

- float32: logits within 1e-4 of the reference and the same greedy tokens, for ragged batches of prompts, page
  sizes 1, 16 and 64 and chunks of 1, 7 and 64 tokens.
- bfloat16: the error of the logits is at most about twice that of transformers in bfloat16 on the same GPU,
  since both round at different places.
- bfloat16 sessions from CUDA graphs, with overlap, concurrent sessions, an interrupt that keeps six tokens
  and a rewind: every greedy token is the most likely one after the whole history, prefilled at once, or
  within a rounding error of it.

Prints one JSON object a line. Run in the root of a checkout; needs torch, triton, transformers, safetensors
and numpy. Families run concurrently, since most of the time is compilation. Exit status 1: a family failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.bench.loops import Talk, open_model
from holdfast.models.model import Model
from tests.gpu.tokens import Way, strict_loop
from tests.models.paged import PagedRunner, Sequence, generate
from tests.models.reference import GENERATED, VARIANTS, VOCABULARY, Reference, Variant, make_reference


def wide(name: str, heads: int, kv_heads: int) -> Variant:
    """A family's small model with heads and weights large enough for the CUDA kernels."""
    small = VARIANTS[name]
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2048 // heads,
        "initializer_range": 0.06,
    }
    return replace(small, arguments={**small.arguments, **sizes})


FAMILIES = {**VARIANTS, "llama-wide": wide("llama", 32, 8), "qwen3-wide": wide("qwen3", 16, 2)}
ROWS = 16
"""Maximum running sessions; with this many, mixed steps run from graphs too."""

SETTINGS = ((1, 7), (16, 64), (64, 1))
EXACT = 1e-4
REGRET = 0.03
"""How far below the largest logit that of a greedy token may be, in units of the largest.

Where rounding changes the choice of experts, in transformers too, a quarter of that error is allowed."""
WORKERS = 12


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of logits, in units of the largest logit."""
    return max(
        float((mine.float().cpu() - other).abs().max() / other.abs().max())
        for mine, other in zip(ours, theirs, strict=True)
    )


def exact(model: Model, reference: Reference) -> tuple[float, bool]:
    """The distance in float32, and whether all greedy tokens are the same."""
    worst, same = 0.0, True
    for page_size, chunk in SETTINGS:
        logits, generated = generate(
            model, reference.prompts, page_size=page_size, chunk=chunk, count=GENERATED
        )
        worst = max(worst, distance(logits, reference.logits))
        same &= generated == reference.generated
    return worst, same


def forced(model: Model, reference: Reference) -> float:
    """The distance over the reference's tokens, in chunks of 37."""
    logits = []
    for prompt, generated in zip(reference.prompts, reference.generated, strict=True):
        tokens = (prompt + generated)[:-1]
        runner, sequence = PagedRunner(model, 16), Sequence()
        parts = [runner.run([(sequence, tokens[at : at + 37])])[0] for at in range(0, len(tokens), 37)]
        logits.append(torch.cat(parts))
    return distance(logits, reference.logits)


@torch.inference_mode()
def theirs(name: str, reference: Reference) -> float:
    """The distance of transformers in bfloat16 from float32."""
    model = FAMILIES[name].build().to("cuda", torch.bfloat16)
    model.set_experts_implementation("eager")  # the grouped product refuses odd sizes
    logits = []
    for prompt, generated in zip(reference.prompts, reference.generated, strict=True):
        tokens = torch.tensor([(prompt + generated)[:-1]], device="cuda")
        logits.append(model(tokens, use_cache=False).logits[0])
    return distance(logits, reference.logits)


def regret(model: Model) -> float:
    """The largest gap between a greedy token of an interrupted, rewound session and the most likely one."""
    loop = strict_loop(model, Way.GRAPHS, page_size=16, overlap=True, rows=ROWS)
    talk, beside = Talk(loop, "one"), [Talk(loop, f"beside {number}") for number in range(4)]

    def say(count: int, limit: int, kept: int | None = None) -> None:
        for number, other in enumerate(beside):
            other.begin([(number + 5 * i) % VOCABULARY for i in range(7 + 4 * number)], 8 + 5 * number, 0.8)
        talk.begin([(11 * talk.turns + 3 * i) % VOCABULARY for i in range(count)], limit)
        if kept is not None:
            while len(talk.said) < kept + 3:
                loop.step()
            loop.scheduler.interrupt("one", loop.now(), kept)
        for each in (talk, *beside):
            each.finish()
        while loop.busy:
            loop.step()

    say(41, 24)
    say(20, 40, kept=6)
    say(3, 16)
    loop.scheduler.rewind("one", 2, loop.now())
    say(5, 16)
    findings = loop.scheduler.audit.census()
    assert not findings, [str(finding) for finding in findings]
    history = loop.scheduler.registry.sessions["one"].sequence.tokens
    tokens = history.slice(0, len(history))
    assert len(tokens) == 41 + 24 + 20 + 6 + 5 + 16
    (logits,) = PagedRunner(model, 16).run([(Sequence(), tokens)])
    spoken = [place for first, end in ((41, 65), (85, 91), (96, 112)) for place in range(first, end)]
    before = logits[[place - 1 for place in spoken]].float()
    said = before.gather(1, torch.tensor(tokens, device="cuda")[spoken][:, None])[:, 0]
    return float((before.max(dim=1).values - said).max() / logits.float().abs().max())


def check(name: str) -> dict[str, object]:
    """All figures of one family, and whether they are within the limits."""
    begun = time.perf_counter()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            reference = make_reference(FAMILIES[name], Path(folder))
            error, same = exact(open_model(Path(folder), "cuda", "float32", dummy=False), reference)
            half = open_model(Path(folder), "cuda", "bfloat16", dummy=False)
            rounded, usual, missed = forced(half, reference), theirs(name, reference), regret(half)
    except Exception:  # noqa: BLE001 - the other families still run
        return {"family": name, "fine": False, "raised": traceback.format_exc(limit=-3)}
    return {
        "family": name,
        "float32": error,
        "same_tokens": same,
        "bfloat16": round(rounded, 4),
        "transformers_bfloat16": round(usual, 4),
        "regret": round(missed, 4),
        "fine": error <= EXACT and same and rounded <= 2 * usual + 0.01 and missed <= max(REGRET, usual / 4),
        "seconds": round(time.perf_counter() - begun),
    }


def main() -> int:
    """Check the families in worker processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="check these families alone")
    names = parser.parse_args().families or list(FAMILIES)
    fine = True
    with multiprocessing.get_context("spawn").Pool(min(WORKERS, len(names)), maxtasksperchild=4) as pool:
        for answer in pool.imap_unordered(check, names):
            print(json.dumps(answer), flush=True)
            fine &= bool(answer["fine"])
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
