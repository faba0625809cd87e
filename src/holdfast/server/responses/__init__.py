"""OpenAI's responses and conversations, on hidden sessions.

    ids            names of responses, items and conversations, and the sessions and turns that they stand for
    tools          tools, `tool_choice` and `text.format` as responses write them
    items          items of the input: checked, stored, and as messages of a chat template
    creation       a response as a route asks for it
    form           the response object, its output items, and the note that is kept with its turn
    events         a response as a stream of events
    running        responses in flight
    store          which session a response continues, and finding responses again
    conversations  conversations

The routes are `routes/responses.py`, `routes/conversations.py` and `routes/responses_socket.py`.
"""
