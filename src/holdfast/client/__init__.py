"""The Python client: sessions and turns of a remote server as plain objects.

Owns the client's side of the wire and nothing of the server's: it imports no other package of Holdfast, so it
works where neither torch nor a model is installed. Called by the command and by users.
"""
