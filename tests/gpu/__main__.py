"""The checks of the GPU without pytest, which a machine with a GPU may lack.

    PYTHONPATH=src python3 -m tests.gpu                  # every kernel, then the tokens of small models
    PYTHONPATH=src python3 -m tests.gpu --only attend    # kernels with this in their name
    PYTHONPATH=src python3 -m tests.gpu --tokens         # the tokens alone

Run in the root of a checkout. Needs torch, triton, transformers, safetensors and numpy. Every kernel is
compared with float64 formulas; small models of each memory layout must generate the same tokens on the CPU,
on the GPU and from CUDA graphs, also under constraints (of llguidance where it is installed), and quantised
checkpoints of every format the same tokens on both. `python3 -m tests.gpu.parity` compares whole models with
transformers. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain

from holdfast.engine.constraints.vocabulary import available
from tests.gpu.checks import run_checks
from tests.gpu.quantised_checks import check_published
from tests.gpu.tokens import check_constrained_tokens, check_tokens


def main() -> int:
    """Run the checks that the arguments select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="check only kernels whose name contains this; no tokens")
    parser.add_argument("--tokens", action="store_true", help="check no kernels")
    given = parser.parse_args()
    failed = 0
    if not given.tokens:
        failed = run_checks(given.only)
        print(json.dumps({"check": "kernels against float64 formulas", "failed": failed}), flush=True)
        if given.only:
            return 1 if failed else 0
    checks = chain(check_published(), check_constrained_tokens(), check_tokens())
    different = [case for case, same in checks if not same]
    for case in different:
        print(json.dumps({"check": "tokens", "case": case, "same": False}), flush=True)
    found = {"different": len(different), "llguidance": available()}
    print(json.dumps({"check": "tokens: CPU, GPU, graphs", **found}), flush=True)
    return 1 if failed or different else 0


if __name__ == "__main__":
    sys.exit(main())
