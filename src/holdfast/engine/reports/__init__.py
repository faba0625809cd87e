"""What an engine reports: who holds the memory, and how long work between two steps takes."""
