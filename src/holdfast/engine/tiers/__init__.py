"""Where sessions' memory lies when it is not on the device: the host's memory, and files on disk."""
