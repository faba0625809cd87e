"""The doors: each turns one kind of client's requests into calls of the service, and answers in its way."""
