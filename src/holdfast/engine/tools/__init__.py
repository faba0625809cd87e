"""Tool calls and reasoning: parsers of answers, grammars that constrain them, messages for templates."""
