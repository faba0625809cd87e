"""Nothing here is a test of ours: `run_sglang_suites.py` uses it."""

collect_ignore_glob = ["*"]
