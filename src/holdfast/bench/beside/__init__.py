"""Holdfast beside other systems in one run: what `bench throughput`, `turns` and `abort` measure.

`crowd` is Holdfast alone: an engine here with more sessions than fit, for `bench sessions --here`.
"""
