"""The torch operators and their CPU references."""
