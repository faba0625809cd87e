"""Small chat templates in the manner of the families."""

HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|im_start|>assistant
{{ message.content.lstrip() }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

AS_STRING = """\
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments + "" }}}</tool_call>{% endfor %}
{% endfor %}"""

CODER = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids must have length 9") }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids must have length 9") }}{% endif -%}
[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}</s>{% endif %}
{%- endfor %}"""

GEMMA = """\
{%- macro written(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is mapping %}{ {%- for key, each in value | items %}{{ "," if not loop.first }}{{ key }}:{{
written(each) }}{% endfor %}} {%- elif value is iterable %}[{% for each in value %}{{ "," if not loop.first
}}{{ written(each) }}{% endfor %}] {%- else %}{{ value | tojson }}{% endif %} {%- endmacro %} {%- for message
in messages %} {%- if message.role == "tool" %}<|tool_response>response:{{ message.name }}{value:{{
written(message.content) }}}<tool_response|> {%- else %}<|turn>{{ message.role }} {% if
message.reasoning_content %}<|channel>thought {{ message.reasoning_content }}<channel|>{% endif %}{{
message.content }} {%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{
written(call.function.arguments) }}<tool_call|>{% endfor %}<turn|>
{% endif %}{% endfor %}"""

HARMONY = """\
{%- for message in messages %}
{%- if message.role == "assistant" and "tool_calls" in message %}
{%- if message.content and message.thinking %}{{ raise_exception("one of both") }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%
endif -%} <|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary
json<|message|> {{- message.tool_calls[0].function.arguments | tojson }}<|call|> {%- elif message.role ==
"tool" %}<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>{{ message.content
| tojson }}<|end|> {%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}"""

LLAMA = """\
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{
message.tool_calls[0].function.arguments | tojson }}}<|eot_id|> {%- elif message.role == "tool"
%}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>{% endif %}
{%- endfor %}"""

NO_TOOLS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"

FAMILIES = {
    "hermes": HERMES,
    "qwen3-coder": CODER,
    "mistral": MISTRAL,
    "gemma4": GEMMA,
    "harmony": HARMONY,
    "llama3-json": LLAMA,
}
