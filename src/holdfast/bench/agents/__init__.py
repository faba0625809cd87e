"""Coding agents as a load: long conversations with tool results, pauses and sub-agents."""
