"""Routes, one dialect a file: requests become calls of the service, results become its answers."""
