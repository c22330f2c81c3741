"""What every room speaks: errors and the value of a quantised weight."""
