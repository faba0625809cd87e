"""What survives a crash: the journal, its records, and recovery from it."""
