"""One step on the device: inputs, block tables, the executor, CUDA graphs, sampling, speculation."""
