"""Telemetry of the server: metrics, traces, logs, recent figures, the live memory map."""
