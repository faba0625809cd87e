"""All benchmarks. Each room measures one thing; the files beside the rooms are shared by them.

    core/     the memory core alone, no model, no device         holdfast bench core
    beside/   Holdfast beside transformers and llama-server      holdfast bench throughput | turns | abort
    url/      many conversations with a running server           holdfast bench sessions
    cpu/      an engine in this process, on a CPU                python -m holdfast.bench.cpu
    gpu/      steps, sessions and kernels on a GPU               python -m holdfast.bench.gpu
    server/   the server alone, with a model that takes no time  python -m holdfast.bench.server

Measurements return figures; commands print them. Only `cli` imports this package.
"""
