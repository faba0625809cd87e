"""Which models the parity tests run over: dense, window and hybrid ones first, then every other family."""

import pytest

FIRST = ("llama", "qwen2", "qwen3", "mistral", "bamba")
OTHERS = (
    "qwen2-window",
    "qwen3-moe",
    "gemma3",
    "gpt-oss",
    "olmo3",
    "mamba2",
    "granite-hybrid",
    "falcon-h1",
    "nemotron-h",
    "qwen3-next",
    "qwen3.5",
)
MORE_LAYOUTS = ("gemma3", "mamba2")  # full and window pages; a state alone
ALL = (*FIRST, *OTHERS)

first = pytest.mark.parametrize("subject", FIRST, indirect=True)
every = pytest.mark.parametrize("subject", ALL, indirect=True)
each_layout = pytest.mark.parametrize(
    "subject",
    [
        *FIRST,
        *(pytest.param(name, marks=() if name in MORE_LAYOUTS else pytest.mark.soak) for name in OTHERS),
    ],
    indirect=True,
)
first_then_soak = pytest.mark.parametrize(
    "subject", [*FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)], indirect=True
)
