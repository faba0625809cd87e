"""Holdfast beside other systems in one run: what `holdfast bench throughput`, `turns` and `abort` measure."""
