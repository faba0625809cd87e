"""Checks of every connection and request before its route: hosts, keys, sizes, deadlines, errors."""
