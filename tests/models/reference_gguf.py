"""A GGUF file as transformers has it: the reference of the tests of the embedded default."""

from functools import cache
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@cache
def reference_of(file: Path) -> PreTrainedModel:
    """Read by transformers' own reader, once in a process (from_pretrained would need more packages)."""
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(file))["config"])).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    return model
