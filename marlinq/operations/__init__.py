"""One folder for each command of the command line."""
