"""Stands in for the package that SGLang's suites import, so that they run against Holdfast.

Only what the suites of sessions use is here. Their own kit and fixture come from the checkout that
`run_sglang_suites.py` is given.
"""
