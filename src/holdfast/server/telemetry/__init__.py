"""What the server tells about itself: metrics, traces, logs, recent figures, the live memory map."""
