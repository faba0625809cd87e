"""OpenAI's realtime events on `/v1/realtime`: text in and out, on one Holdfast session for each connection.

`protocol` decides which of the two protocols a connection speaks; `conversation` is one connection. The
client edits a list of items (`items`), and the session has turns (`history`): before a response starts, an
append, a cut or a rewind brings the session to the state of the client's list (`talk`).
"""
