"""A GGUF file as transformers has it: the reference of the tests of the embedded default."""

from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from holdfast.models.checkpoint import open_checkpoint


@cache
def reference_of(file: Path) -> PreTrainedModel:
    """Read by transformers' own reader, once in a process (from_pretrained would need more packages).

    Its reader takes seconds for the vocabulary alone, so it reads once: tensors get their names from an
    outline without weights, which only has to have the right number of layers, and the configuration is
    the reader's. It looks at the file through a plain array, and makes its table of names once and not once
    a module: half of its time.
    """
    with torch.device("meta"):
        outline = LlamaForCausalLM(LlamaConfig(num_hidden_layers=len(open_checkpoint(file).config.layers)))
    mapped = np.memmap
    with (
        patch.object(np, "memmap", lambda path, mode: np.asarray(mapped(path, mode=mode))),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=outline)
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**read["config"])).eval()
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    return model
