"""Engines in this process, on a CPU."""
