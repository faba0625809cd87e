"""Text in and out: tokenizers, chat templates, streaming detokenisation, stop strings."""
