"""Benchmarks of several engines and API processes on one machine."""
