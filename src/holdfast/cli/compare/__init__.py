"""Holdfast beside other systems in one run: what `bench throughput`, `turns` and `abort` measure."""
