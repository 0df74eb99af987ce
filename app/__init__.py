"""What a request is and the rules that keep it safe. Imports neither ``workers`` nor ``web``."""

__version__ = "0.1.0"
