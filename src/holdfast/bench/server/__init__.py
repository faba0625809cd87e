"""The server alone: a real server process whose model takes no time."""
