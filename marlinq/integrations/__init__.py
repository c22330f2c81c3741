"""Where other libraries use marlinq: one package for each of them."""
