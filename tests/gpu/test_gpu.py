"""On a machine with a GPU: kernels agree with formulas, and sessions generate the tokens of the CPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.gpu.checks import CHECKS
from tests.gpu.kernel_checks import LIMITS
from tests.gpu.tokens import check_constrained_tokens, check_tokens


@pytest.mark.parametrize("name", sorted(CHECKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.timeout(300)
def test_kernels_agree_with_the_formulas(name: str, dtype: torch.dtype) -> None:
    assert max(CHECKS[name](dtype)) <= LIMITS[dtype]


@pytest.mark.timeout(600)
def test_sessions_generate_the_same_tokens() -> None:
    assert [case for case, same in check_tokens() if not same] == []


@pytest.mark.timeout(600)
def test_constrained_turns_generate_the_same_tokens() -> None:
    assert [case for case, same in check_constrained_tokens() if not same] == []
