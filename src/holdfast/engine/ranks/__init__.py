"""Tensor parallelism: the ranks of one model. Rank 0 plans; the others carry out its steps on their parts."""
