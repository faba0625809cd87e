"""Speculation with a draft model: its cache, its passes, when drafting pays, and how it is loaded."""
