"""Engines and API processes on Ray Serve: `holdfast serve --replicas`."""
