"""Load on a running server from outside: what `holdfast bench sessions` measures."""
