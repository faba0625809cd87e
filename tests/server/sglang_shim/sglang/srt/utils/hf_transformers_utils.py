"""The served model's own tokenizer, with the names that the suites use."""

from holdfast.engine.start.pull import resolve_model
from holdfast.engine.text.tokenizer import Tokenizer, open_tokenizer
from holdfast.models.checkpoint import open_checkpoint
from sglang.test.test_utils import served_model


class SuiteTokenizer:
    """Encodes text as the server does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        bos = tokenizer.names.get("bos_token")
        self.bos_token_id = None if bos is None else tokenizer.token_of(bos)
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return self._tokenizer.encode(text)


def get_tokenizer(model: str) -> SuiteTokenizer:
    """The tokenizer of a model that the server knows by this name."""
    return SuiteTokenizer(open_tokenizer(open_checkpoint(resolve_model(served_model(model)))))
