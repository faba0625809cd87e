"""Holdfast: an LLM inference server for long-lived streaming sessions.

Importing this package is cheap: it imports no torch and none of the packages below it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
