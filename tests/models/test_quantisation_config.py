"""`quantization_config` says in which form each module is stored."""

import json
from pathlib import Path

import pytest

from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.quantised.forms import Form, Layout, Quantisation, read_quantisation

DOWN, Q, HEAD = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj", "lm_head"
INT4: dict[str, Json] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8: dict[str, Json] = {"num_bits": 8, "type": "float", "strategy": "channel"}


def read(config: dict[str, Json], path: Path = Path("none")) -> Quantisation:
    found = read_quantisation(Fields({"quantization_config": config}, "config.json"), path)
    assert found is not None
    return found


def test_a_checkpoint_without_one_is_not_quantised(tmp_path: Path) -> None:
    assert read_quantisation(Fields({}, "config.json"), tmp_path) is None


def test_groups_of_different_formats() -> None:
    """Names and regular expressions come before the class of modules, and what is ignored before both."""
    found = read(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
                "b": {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": "float-quantized"},
            },
            "ignore": ["lm_head", "re:.*layers\\.0\\..*"],
        }
    )
    assert found.form(DOWN) == Form(Layout.PACKED, 4, 128)
    assert found.form(Q) == Form(Layout.FP8, 8, None)
    assert found.form(HEAD) is None
    assert found.form("model.layers.0.mlp.down_proj") is None
    assert len(found.forms()) == 2


def test_a_dense_format_leaves_the_weights_alone() -> None:
    config: dict[str, Json] = {
        "config_groups": {"a": {"targets": ["Linear"], "weights": INT4}},
        "format": "dense",
        "kv_cache_scheme": {"num_bits": 8},
    }
    assert read(config).forms() == ()


def test_gptq_with_exceptions() -> None:
    """`dynamic`: modules left out, and modules with other groups; the head only if it is named."""
    config: dict[str, Json] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "sym": False,
        "dynamic": {r"-:.*q_proj": {}, r"+:.*down_proj": {"group_size": 32, "desc_act": False}},
    }
    found = read(config)
    assert found.form(Q) is None and found.form(HEAD) is None
    assert found.form(DOWN) == Form(Layout.GPTQ, 4, 32, symmetric=False, off_by_one=True)
    up = found.form("model.layers.1.mlp.up_proj")
    assert up == Form(Layout.GPTQ, 4, 128, symmetric=False, act_order=True, off_by_one=True)
    assert read({**config, "lm_head": True}).form(HEAD) is not None


def test_modules_are_named_whole_in_lists() -> None:
    """`gate` is the router, not the gate projection."""
    found = read({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate"]})
    assert found.form("model.layers.1.mlp.gate") is None
    assert found.form("model.layers.1.mlp.gate_proj") == Form(Layout.AWQ, 4, 128, symmetric=False)
    blocks = read({"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]})
    assert blocks.form(HEAD) is None and blocks.form(Q) == Form(Layout.FP8, 8, 128)


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    given = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.0*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(given))
    found = read_quantisation(Fields({}, "config.json"), tmp_path)
    assert found is not None and found.method == "modelopt"
    assert found.form(Q) == Form(Layout.NVFP4_MODELOPT, 4, 16)
    assert found.form("model.layers.0.mlp.up_proj") is None and found.form(HEAD) is None
    assert read({"quant_method": "modelopt", "quant_algo": "FP8"}).form(Q) == Form(Layout.FP8, 8, None)


def test_mxfp4_is_for_experts_alone() -> None:
    found = read({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert found.form("model.layers.3.mlp.experts.gate_up_proj") == Form(Layout.MXFP4_EXPERTS, 4, 32)
    assert found.form(Q) is None and found.form("model.layers.3.mlp.router") is None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(.*)*x", "repetition"),
        (r"((\w+\.?)+)+!", "repetition"),
        (r"(?:a|a)*!", "alternatives"),
        (r"([)]a{2,})+", "repetition"),
        (r"(?x:(a+ # (\n)+)", "comments"),
        (r"(?:(a+(?#())+)", "comments"),
        (".*" * 7 + "x", "7 repetitions"),
        ("x" * 1001, "1001 characters"),
        ("(", "unterminated"),
    ],
)
def test_expressions_that_take_exponential_time_are_rejected_with_the_file(pattern: str, why: str) -> None:
    """`re` would not come back from matching them with a module's name."""
    gptq: dict[str, Json] = {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}}
    packed: dict[str, Json] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": [f"re:{pattern}"],
    }
    for config in (gptq, packed):
        with pytest.raises(ConfigurationError, match=rf"config\.json.*{why}") as refused:
            read(config)
        assert len(str(refused.value)) < 500


def test_expressions_of_published_checkpoints_are_taken() -> None:
    patterns = [
        r".*layers\.\d+\..*mlp\.(gate|up|down)_proj",
        r"^(?!.*(\.experts\.)).*$",
        r"model\.layers\.[0-9]{1,2}\.mlp\.experts\..*",
        r"(?:model\.)?lm_head",
        r".*[(*+]?\(?\+x",
    ]
    config: dict[str, Json] = {"quant_method": "gptq", "bits": 4}
    for pattern in patterns:
        read({**config, "dynamic": {f"-:{pattern}": {}}})
    assert read({**config, "dynamic": {f"-:{patterns[0]}": {}}}).form(DOWN) is None


@pytest.mark.parametrize("size", [0, -2, 3, 2**63 + 1, "128", 64.5, [64]])
def test_groups_that_cannot_be_are_rejected_by_name(size: Json) -> None:
    for config in (
        {"quant_method": "gptq", "bits": 4, "group_size": size},
        {"quant_method": "awq", "bits": 4, "group_size": size},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"targets": ["Linear"], "weights": {**INT4, "group_size": size}}},
        },
    ):
        with pytest.raises(ConfigurationError, match="group_size"):
            read(config)
