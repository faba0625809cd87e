"""Records the request fields of the `anthropic` package, which `tests/server/test_package_fields.py` sorts.

Run by hand, in the clients' environment, when its version is changed:

    .venv-clients/openai3/bin/python -m tests.clients.record_fields
"""

from __future__ import annotations

import json
from pathlib import Path

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from tests.server.package_fields import shapes_of

__all__ = ["RECORDED", "recorded_text"]

RECORDED = Path(__file__).parents[1] / "server" / "recorded" / "fields" / "anthropic.json"

SHAPES = (
    "AssistantMessageParam",
    "CacheControlEphemeralParam",
    "JSONOutputFormatParam",
    "MessageCountTokensParams",
    "MessageCreateParamsBase",
    "OutputConfigParam",
    "RedactedThinkingBlockParam",
    "SystemMessageOutputConfigParam",
    "SystemMessageParam",
    "TextBlockParam",
    "ThinkingBlockParam",
    "ThinkingConfigAdaptiveParam",
    "ThinkingConfigDisabledParam",
    "ThinkingConfigEnabledParam",
    "ToolChoiceAnyParam",
    "ToolChoiceAutoParam",
    "ToolChoiceNoneParam",
    "ToolChoiceToolParam",
    "ToolParam",
    "ToolResultBlockParam",
    "ToolUseBlockParam",
    "UserMessageParam",
)
"""What the server takes. It refuses other blocks, tools and choices by their type."""


def recorded_text() -> str:
    """The fields of the installed package, as they are recorded."""
    shapes = shapes_of(
        message_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
        beta_create_params.MessageCreateParamsBase,
        beta_count_tokens_params.MessageCountTokensParams,
    )
    return json.dumps({name: shapes[name] for name in SHAPES}, indent=1) + "\n"


if __name__ == "__main__":
    RECORDED.write_text(recorded_text())
