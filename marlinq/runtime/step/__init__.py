"""The decode step, put together from an anatomy."""
