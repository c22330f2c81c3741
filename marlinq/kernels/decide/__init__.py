"""Which kernel variant runs a problem, and why: problems, GPUs, candidates, cost models."""
