"""Text processes: templates, tokenising and large bodies away from the event loop, and their queue."""
