"""Launching products: arguments from operands, prepared launches, plans kept between calls."""
