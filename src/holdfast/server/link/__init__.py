"""The process boundary, both ends: messages, the API's engine client, the engine process and its commands."""
