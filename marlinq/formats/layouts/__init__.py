"""One file for each tensor layout."""
