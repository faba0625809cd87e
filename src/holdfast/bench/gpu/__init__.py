"""Steps, sessions and kernels on an NVIDIA GPU; runs without the web packages."""
