"""Decode steps: forwards built from a model's anatomy, and the choice among them."""
