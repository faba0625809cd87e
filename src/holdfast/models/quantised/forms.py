"""What `quantization_config` says: the form in which each module of a checkpoint is stored.

`read_quantisation` returns a `Quantisation`, or None for a checkpoint that is not quantised. Methods, formats
and settings that are not supported are rejected by name, before any weight is read. Called by `checkpoint`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from holdfast.models.fields import ConfigurationError, Fields
from holdfast.models.quantised.patterns import compile_bounded

log = logging.getLogger("holdfast.models")

BLOCK = 128
"""The block of fp8 weights in both directions."""

PATTERN_SHOWN = 200
"""Characters of a pattern in an error."""

INSTEAD = (
    "give a checkpoint in 16 bits, in MXFP4, NVFP4, fp8, GPTQ, AWQ or compressed-tensors, or a GGUF file"
)

_HINTS = {
    "bitsandbytes": "it is made while weights load, from a checkpoint in 16 bits: give that one, or "
    "a GPTQ, AWQ, compressed-tensors or GGUF version of the model",
    "torchao": "it is usually made while weights load, from a checkpoint in 16 bits: give that one, or "
    "a compressed-tensors or GGUF version of the model",
    "auto-round": "export it in the GPTQ or AWQ format, which auto-round writes too",
}


class Layout(Enum):
    """How a module is stored."""

    PACKED = auto()
    """compressed-tensors: integers packed into int32 along the inputs."""
    INT8 = auto()
    """compressed-tensors: one int8 for each element."""
    FP8 = auto()
    GPTQ = auto()
    AWQ = auto()
    MXFP4_EXPERTS = auto()
    """gpt-oss: the blocks and scales of all experts of a layer."""
    MXFP4 = auto()
    NVFP4 = auto()
    """compressed-tensors: 4-bit floats, scales in fp8, divided by one scale for the weight."""
    NVFP4_MODELOPT = auto()
    """ModelOpt: the same, multiplied by one scale for the weight."""

    @property
    def ending(self) -> str:
        """The end of the name of a module's codes."""
        return _ENDINGS[self]

    @property
    def dtype(self) -> str:
        """The dtype of a module's codes, by its name in safetensors files."""
        return _DTYPES[self]


_ENDINGS = {
    Layout.PACKED: ".weight_packed",
    Layout.INT8: ".weight",
    Layout.FP8: ".weight",
    Layout.GPTQ: ".qweight",
    Layout.AWQ: ".qweight",
    Layout.MXFP4_EXPERTS: "_blocks",
    Layout.MXFP4: ".weight_packed",
    Layout.NVFP4: ".weight_packed",
    Layout.NVFP4_MODELOPT: ".weight",
}
_DTYPES = {
    Layout.PACKED: "I32",
    Layout.INT8: "I8",
    Layout.FP8: "F8_E4M3",
    Layout.GPTQ: "I32",
    Layout.AWQ: "I32",
    Layout.MXFP4_EXPERTS: "U8",
    Layout.MXFP4: "U8",
    Layout.NVFP4: "U8",
    Layout.NVFP4_MODELOPT: "U8",
}


@dataclass(frozen=True, slots=True)
class Form:
    """How one module is stored. `group` is None where a whole row shares its scale."""

    layout: Layout
    bits: int
    group: int | None
    symmetric: bool = True
    act_order: bool = False
    off_by_one: bool = False
    """Whether zero points are stored less one (GPTQ's first format)."""

    def __str__(self) -> str:
        group = "rows" if self.group is None else f"groups of {self.group}"
        return f"{self.layout.name} {self.bits} bits in {group}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A form for the modules that match; None: they are not quantised."""

    patterns: tuple[re.Pattern[str], ...]
    form: Form | None


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The method of a checkpoint, and the forms of its modules: the first rule that matches one decides."""

    method: str
    rules: tuple[Rule, ...]

    def form(self, module: str) -> Form | None:
        """The form that the configuration gives a module, by its name in the checkpoint."""
        for rule in self.rules:
            if any(pattern.search(module) for pattern in rule.patterns):
                return rule.form
        return None

    def forms(self) -> tuple[Form, ...]:
        """Every form that the configuration names, without repetition."""
        return tuple(dict.fromkeys(rule.form for rule in self.rules if rule.form is not None))


_EVERY = (re.compile(""),)


def read_quantisation(fields: Fields, path: Path) -> Quantisation | None:
    """The quantisation of a Hugging Face directory, from config.json or ModelOpt's file beside it."""
    if fields.has("quantization_config"):
        given = fields.inner("quantization_config")
        method = given.text("quant_method", "compressed-tensors" if given.has("config_groups") else "unknown")
    elif (path / "hf_quant_config.json").exists():
        given, method = Fields.read(path / "hf_quant_config.json").inner("quantization"), "modelopt"
    else:
        return None
    method = method.lower().replace("_", "-")
    reader = _METHODS.get(method)
    if reader is None:
        hint = _HINTS.get(method, INSTEAD)
        raise ConfigurationError(f"{path} is quantised with {method}, which is not supported; {hint}")
    quantisation = Quantisation(method, reader(given))
    if given.raw("kv_cache_scheme") or given.raw("kv_cache_quant_algo"):
        log.info("%s has scales of a quantised KV cache, which are not used", path)
    return quantisation


def _unsupported(fields: Fields, what: str) -> ConfigurationError:
    return ConfigurationError(f"{fields.where}: {what} is not supported; {INSTEAD}")


def _only(fields: Fields, key: str, supported: tuple[int, ...], default: int | None = None) -> int:
    value = fields.integer(key, default)
    if value not in supported:
        known = " or ".join(map(str, supported))
        raise _unsupported(fields, f"{key!r} of {value} (supported: {known})")
    return value


def _group(fields: Fields, default: int | None = None) -> int | None:
    """`group_size`; -1 and null stand for one group a row."""
    if fields.raw("group_size") == -1 or (default is None and not fields.has("group_size")):
        return None
    size = fields.integer("group_size", default)
    if size % 2:
        raise _unsupported(fields, f"'group_size' of {size}, an odd number,")
    return size


def _substrings(fields: Fields, key: str) -> tuple[re.Pattern[str], ...]:
    """Modules listed by a part of their names, which begins and ends at dots."""
    names = fields.texts(key) if fields.has(key) else ()
    return tuple(re.compile(rf"(^|\.){re.escape(name.strip('.'))}(\.|$)") for name in names)


def _wildcards(fields: Fields, *keys: str) -> tuple[re.Pattern[str], ...]:
    """Modules listed as shell patterns."""
    found = [name for key in keys if fields.has(key) for name in fields.texts(key)]
    return tuple(_from_wildcard(name) for name in found)


def _from_wildcard(name: str) -> re.Pattern[str]:
    text = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", name))
    return re.compile(f"^{text}(\\.|$)")


def _fp8(fields: Fields) -> tuple[Rule, ...]:
    block = fields.integers("weight_block_size")
    if block not in ((), (BLOCK, BLOCK)):
        raise _unsupported(fields, f"'weight_block_size' of {list(block)}")
    form = Form(Layout.FP8, 8, BLOCK if block else None)
    skipped = _substrings(fields, "modules_to_not_convert") + _substrings(fields, "ignored_layers")
    return Rule(skipped, None), Rule(_EVERY, form)


def _mxfp4(fields: Fields) -> tuple[Rule, ...]:
    skipped = _substrings(fields, "modules_to_not_convert")
    form = Form(Layout.MXFP4_EXPERTS, 4, 32)
    return Rule(skipped, None), Rule((re.compile(r"\.experts\.(gate_up_proj|down_proj)$"),), form)


def _gptq(fields: Fields) -> tuple[Rule, ...]:
    version = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported(fields, f"checkpoint format {version!r}")
    form = Form(
        Layout.GPTQ,
        _only(fields, "bits", (4,)),
        _group(fields, 128),
        fields.flag("sym", True),
        fields.flag("desc_act", False),
        off_by_one=version == "gptq",
    )
    rules: list[Rule] = []
    dynamic = fields.inner("dynamic")
    for name in dynamic.names():
        pattern = (_compiled(fields, name.removeprefix("-:").removeprefix("+:")),)
        if name.startswith("-:"):
            rules.append(Rule(pattern, None))
            continue
        changes = dynamic.inner(name)
        changed = replace(form, bits=_only(changes, "bits", (4,), form.bits))
        if changes.has("group_size"):
            changed = replace(changed, group=_group(changes))
        rules.append(Rule(pattern, replace(changed, act_order=changes.flag("desc_act", form.act_order))))
    if not fields.flag("lm_head"):
        rules.append(Rule((re.compile(r"(^|\.)lm_head$"),), None))
    return *rules, Rule(_substrings(fields, "modules_to_not_convert"), None), Rule(_EVERY, form)


def _awq(fields: Fields) -> tuple[Rule, ...]:
    version = fields.text("version", fields.text("format", "gemm")).lower()
    if version != "gemm":
        raise _unsupported(fields, f"version {version!r} (supported: 'gemm')")
    if not fields.flag("zero_point", True):
        raise _unsupported(fields, "'zero_point' of false")
    form = Form(Layout.AWQ, _only(fields, "bits", (4,), 4), _group(fields, 128), symmetric=False)
    return (
        Rule((*_substrings(fields, "modules_to_not_convert"), re.compile(r"(^|\.)lm_head$")), None),
        Rule(_EVERY, form),
    )


def _compiled(fields: Fields, pattern: str) -> re.Pattern[str]:
    try:
        return compile_bounded(pattern)
    except (re.error, ValueError) as error:
        shown = pattern if len(pattern) <= PATTERN_SHOWN else f"{pattern[:PATTERN_SHOWN]}…"
        raise ConfigurationError(
            f"{fields.where}: {shown!r} is not a regular expression that can be used: {error}"
        ) from error


def _targets(fields: Fields, names: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Targets of compressed-tensors: regular expressions, module names, or a class of modules."""
    found: list[re.Pattern[str]] = []
    for name in names:
        if name.startswith("re:"):
            found.append(_compiled(fields, name.removeprefix("re:")))
        elif name != "Linear":
            found.append(re.compile(rf"(^|\.){re.escape(name)}$"))
    return tuple(found)


def _compressed_tensors(fields: Fields) -> tuple[Rule, ...]:
    if fields.inner("sparsity_config").text("format", "dense") != "dense":
        raise _unsupported(fields, "a sparse checkpoint")
    ignored = _targets(fields, fields.texts("ignore")) if fields.has("ignore") else ()
    named, general = [], []
    groups = fields.inner("config_groups")
    for key in groups.names():
        group = groups.inner(key)
        form = _scheme(group, group.text("format", fields.text("format", "dense")))
        targets = group.texts("targets") if group.has("targets") else ("Linear",)
        if patterns := _targets(fields, targets):
            named.append(Rule(patterns, form))
        if "Linear" in targets:
            general.append(Rule(_EVERY, form))
    return Rule(ignored, None), *named, *general


def _scheme(group: Fields, layout: str) -> Form | None:
    """One group of compressed-tensors' configuration; None where it leaves the weights alone."""
    weights = group.inner("weights")
    if not weights.names() or layout == "dense":
        return None
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    strategy, symmetric = weights.text("strategy", "tensor"), weights.flag("symmetric", True)
    order = weights.raw("actorder") in ("group", "dynamic", True)
    size = _group(weights) if strategy in ("group", "tensor_group") else None
    match layout, kind, bits, strategy:
        case "pack-quantized", "int", 4, "group" | "channel":
            return Form(Layout.PACKED, 4, size, symmetric, order)
        case "pack-quantized", "int", 8, "group" | "channel" if symmetric:
            return Form(Layout.PACKED, 8, size, act_order=order)
        case (("int-quantized" | "naive-quantized"), "int", 8, "channel" | "tensor" | "group") if symmetric:
            return Form(Layout.INT8, 8, size)
        case (("float-quantized" | "naive-quantized"), "float", 8, "tensor" | "channel"):
            return Form(Layout.FP8, 8, None)
        case (("float-quantized" | "naive-quantized"), "float", 8, "block"):
            if weights.integers("block_structure") not in ((), (BLOCK, BLOCK)):
                raise _unsupported(weights, f"'block_structure' of {weights.raw('block_structure')}")
            return Form(Layout.FP8, 8, BLOCK)
        case "nvfp4-pack-quantized", "float", 4, _ if size == 16:
            return Form(Layout.NVFP4, 4, 16)
        case "mxfp4-pack-quantized", "float", 4, _ if size == 32:
            return Form(Layout.MXFP4, 4, 32)
    form = "" if symmetric else ", asymmetric"
    raise _unsupported(weights, f"{layout} with {bits}-bit {kind} weights by {strategy}{form}")


def _modelopt(fields: Fields) -> tuple[Rule, ...]:
    algorithm = fields.text("quant_algo", "unknown").upper()
    ignored = Rule(_wildcards(fields, "ignore", "exclude_modules"), None)
    if algorithm == "FP8":
        return ignored, Rule(_EVERY, Form(Layout.FP8, 8, None))
    if algorithm == "NVFP4":
        _only(fields, "group_size", (16,), 16)
        return ignored, Rule(_EVERY, Form(Layout.NVFP4_MODELOPT, 4, 16))
    raise _unsupported(fields, f"'quant_algo' of {algorithm}")


_METHODS = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
