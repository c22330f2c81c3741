"""From operands to a running kernel: the driver, prepared launches, plans kept between calls."""
