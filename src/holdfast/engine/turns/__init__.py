"""Turns and verbs on their way to the core: what they wait for, how a turn begins, what is acknowledged."""
