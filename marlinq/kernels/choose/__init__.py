"""Which variant runs a problem, and why: decided without a GPU."""
