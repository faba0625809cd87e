"""The cost of the memory core alone, without a model and a device: `holdfast bench core`.

registry.py is the table of measurements, anchors.py has the baseline's figures for the same work. Imports the
core and the standard library alone. Times are thread-CPU times with the garbage collector off; what is
compared runs interleaved in one process.
"""
