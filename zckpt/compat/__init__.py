"""Modules that stand in for other people's: the same names, arguments and results."""
