"""The core's benchmark: what its memory work costs, with no model and no device under it.

Owns the workloads, the clock, the measurements in groups, and the baseline's figures for the same work
(anchors.py). registry.py is the table of measurements; the command prints what they return. Imports the
core and the standard library alone. Times are thread-CPU times with the garbage collector off; whatever is
compared runs interleaved in one process.
"""
