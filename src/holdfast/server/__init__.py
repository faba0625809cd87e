"""The server: HTTP and WebSocket in front of an engine.

Owns the routes, authentication, limits, metrics and the page in the browser. Everything that only HTTP needs
stays here. Imports the engine and the core's words; called by the command.
"""
