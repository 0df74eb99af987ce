"""What a search is for."""


class Violation(Exception):
    """Something happened that the product promises never happens."""
