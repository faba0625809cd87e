"""Quantised checkpoints: what their configuration says, and their tensors as `QuantisedWeight`s.

`forms` reads `quantization_config` and says in which form each module is stored; `integers` and `floats` read
a module in one of those forms; `products` are the linear projections made of them. A new format is a row in
`forms` and a function that rearranges its bytes.
"""
