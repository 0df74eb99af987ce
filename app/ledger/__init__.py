"""The ledger: the Redis records that hold the truth, and the scripts that are the only way to change them."""

from app.ledger.api import Ledger

__all__ = ["Ledger"]
