"""Run-time compilation, its cache, and what compiled variants take of a multiprocessor."""
