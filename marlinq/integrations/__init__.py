"""Integrations of marlinq into other libraries, one package for each."""
