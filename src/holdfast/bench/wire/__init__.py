"""Where the time of a turn goes between the client's socket and the engine: `holdfast bench wire`."""
