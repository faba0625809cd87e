"""Tool calls and reasoning: parsers of answers, grammars that constrain them, messages for templates.

Three independent things, each on `request.Tools`, which `request.read_tools` makes of a request's fields:

- `parser.AnswerParser` makes `events` of an answer as it streams. `choose.choose` names the formats of a
checkpoint,
  `formats` holds them by name; a checkpoint's own response template is a format too (`template_calls`).
- `constraint.tool_grammar` gives the grammar of an answer with calls, for llguidance.
- `rendering.template_messages` brings messages into the form of a template, which `rendering.probe` finds
out;
  `rendering.tail_after_calls` gives what follows calls in an append-only session, and `plain_rendering`
  serves templates that know no tools.

Nothing in here does I/O, waits, or keeps state beyond one answer: a parser is rebuilt by feeding it the
answer again.
"""
