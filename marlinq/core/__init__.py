"""Types that all rooms use: errors, schemes, quantised weights, rules, devices, progress."""
