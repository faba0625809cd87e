"""Request fields that OpenAI, vLLM or SGLang honour and this server does not: one table for every dialect.

A client that asks for a grammar or an adapter must not get an ordinary answer. So these fields
are refused by name, unless their value has no effect (`null`, or one of those in the table). A field that a
body declares is supported there: `tools` is refused by `/generate` and not by `/v1/chat/completions`.
Fields that change neither the answer nor its guarantees (`HINTS`) are ignored like any unknown
field, except by `/v1/sessions` and `/v1/realtime`, which refuse every unknown field. `requests`
applies the table.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ANTHROPIC_FIELDS", "FIELDS", "HINTS", "MESSAGE_FIELDS", "NOT_BUILT", "Values"]

Values = tuple[Any, ...]

NOT_BUILT = "is not supported yet"

OFF: Values = (False, "", [], {})
"""Values that ask for nothing wherever a field is off by default."""

NEVER: Values = ()
"""Whatever is given asks for something: 0 or false too."""

CONSTRAINTS = {
    "response_format": (*OFF, {"type": "text"}),
    "structured_outputs": OFF,
    "json_schema": OFF,
    "regex": OFF,
    "ebnf": OFF,
    "grammar": OFF,
    "structural_tag": OFF,
    "stop_regex": OFF,
    "guided_json": OFF,
    "guided_json_object": OFF,
    "guided_regex": OFF,
    "guided_choice": OFF,
    "guided_grammar": OFF,
    "guided_decoding_backend": OFF,
    "guided_whitespace_pattern": OFF,
}
TOOLS = {
    "tools": OFF,
    "tool_choice": (*OFF, "none", "auto"),
    "functions": OFF,
    "function_call": (*OFF, "none", "auto"),
    "web_search_options": NEVER,
}
WRITING = {
    "chat_template": OFF,
    "chat_template_kwargs": OFF,
    "add_generation_prompt": (True,),
    "continue_final_message": OFF,
    "add_special_tokens": NEVER,
    "documents": OFF,
    "echo": OFF,
    "suffix": OFF,
    "truncate_prompt_tokens": NEVER,
    "truncation_side": NEVER,
    "task": OFF,
    "reasoning": OFF,
    "reasoning_effort": NEVER,
    "thinking": NEVER,
    "enable_thinking": NEVER,
    "thinking_budget": NEVER,
    "thinking_token_budget": NEVER,
    "max_thinking_tokens": NEVER,
    "require_reasoning": OFF,
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "moderation": OFF,
}
INPUTS = {
    "input_ids": OFF,
    "input_embeds": OFF,
    "prompt_embeds": OFF,
    "positional_embed_overrides": OFF,
    "modalities": (*OFF, ["text"]),
    "audio": OFF,
    "image_data": OFF,
    "video_data": OFF,
    "audio_data": OFF,
    "use_audio_in_video": OFF,
    "images_config": OFF,
    "video_config": OFF,
    "media_io_kwargs": OFF,
    "mm_processor_kwargs": OFF,
    "multi_item_delimiter_indices": OFF,
    "lora_path": OFF,
    "lora_id": OFF,
    "lora_name": OFF,
    "lora": OFF,
    "session_id": OFF,
    "session_params": OFF,
}
SAMPLING = {
    "prompt_logprobs": NEVER,
    "logprob_token_ids": OFF,
    "token_ids_logprob": OFF,
    "allowed_token_ids": OFF,
    "bad_words": OFF,
    "bad_words_ids": OFF,
    "logits_processors": OFF,
    "custom_logit_processor": OFF,
    "custom_params": OFF,
    "vllm_xargs": OFF,
    "repetition_detection": OFF,
    "use_beam_search": OFF,
    "best_of": (1,),
    "early_stopping": OFF,
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": OFF,
    "no_stop_trim": OFF,
}
SHOWN = {
    "continuous_usage_stats": OFF,
    "return_assistant_tokens_mask": OFF,
    "return_bytes": OFF,
    "return_cached_tokens_details": OFF,
    "return_entropy": OFF,
    "return_flat_raw_top_logprobs": OFF,
    "return_hidden_states": OFF,
    "return_indexer_topk": OFF,
    "return_meta_info": OFF,
    "return_prompt_text": OFF,
    "return_prompt_token_ids": OFF,
    "return_routed_experts": OFF,
    "return_sampling_mask": OFF,
    "return_spec_tokens_details": OFF,
    "return_token_ids": OFF,
    "return_token_offsets": OFF,
    "return_token_strs": OFF,
    "return_tokens_as_token_ids": OFF,
}
SERVING = {
    "background": OFF,
    "bootstrap_host": OFF,
    "bootstrap_port": NEVER,
    "bootstrap_room": NEVER,
    "cache_salt": OFF,
    "ec_transfer_params": OFF,
    "extra_key": OFF,
    "kv_transfer_params": OFF,
    "priority": (0,),
    "rid": OFF,
}

FIELDS: dict[str, Values] = {
    **CONSTRAINTS,
    **TOOLS,
    **WRITING,
    **INPUTS,
    **SAMPLING,
    **SHOWN,
    **SERVING,
}
"""Fields of a body or of its sampling, with the values besides `null` that ask for nothing."""

ANTHROPIC_FIELDS: dict[str, Values] = {
    "anthropic_beta": OFF,
    "betas": OFF,
    "compaction": OFF,
    "container": OFF,
    "diagnostics": (*OFF, {"previous_message_id": None}),
    "fallback_credit_token": OFF,
    "fallbacks": OFF,
    "inference_geo": (*OFF, "global"),
    "mcp_servers": OFF,
    "speed": (*OFF, "standard"),
}
"""Fields of Anthropic's Messages, in the same way; `/v1/messages` refuses those above, too."""

HINTS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's that may be sent and change nothing: names of users and caches, billing, predictions."""

MESSAGE_FIELDS: dict[str, Values] = {
    "function_call": OFF,
    "tools": OFF,
    "audio": OFF,
    "refusal": OFF,
    "thinking": OFF,
    "prefix": OFF,
    "partial": OFF,
}
"""Fields of a message, in the same way."""
