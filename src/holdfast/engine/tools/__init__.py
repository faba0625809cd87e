"""Tool calls and reasoning: parse what a model generates, constrain it, and prepare messages for its template."""
