"""Options are checked when they are made, and every error names its option."""

import pytest

from holdfast.engine.options import EngineOptions, OptionError, make_options


def test_defaults_are_possible() -> None:
    assert make_options() == EngineOptions()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("page_size", 0),
        ("page_size", 257),
        ("page_size", True),
        ("page_size", 1.5),
        ("context_length", 0),
        ("kv_tokens", -1),
        ("window_tokens", 0),
        ("state_slots", 0),
        ("session_tokens", 0),
        ("max_running", 0),
        ("chunk_tokens", 0),
        ("step_tokens", 0),
        ("max_queue", 0),
        ("max_sessions", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.0),
        ("host_memory", -1),
        ("checkpoints", -1),
        ("session_ttl", 0.0),
        ("tenant_device", 0.0),
        ("tenant_host", 1.5),
        ("tenant_disk", -1.0),
        ("tenant_shares", {"ann": {"device": 2.0}}),
        ("tenant_shares", {"ann": {"gpu": 0.5}}),
        ("load_format", "pickle"),
        ("audit", "off"),
    ],
)
def test_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"^{option} ") as caught:
        make_options(**{option: value})
    assert caught.value.option == option


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"^pagesize is no option; there are .*page_size") as caught:
        make_options(pagesize=16)
    assert caught.value.option == "pagesize"
