"""The pure core: memory, sequences, sessions, turns and the scheduler as plain, deterministic state.

Owns every decision about who holds which unit of device memory. It reads no clock, no random source, no file
and no environment variable, starts no thread and imports only the standard library: everything it needs
arrives as an argument. The simulation and the engine call it; it calls neither.
"""
