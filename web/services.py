"""What the routes of one web process share. Made once by ``create_app``, found through the Flask app."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, cast

from flask import current_app

from app.ledger.api import Ledger
from app.protocol.commands import Bell
from app.settings import Settings
from web.node import WebNode
from web.process import Process
from web.served import ServedModel

KEY = "baton"


class Ringer(Protocol):
    """Rings doorbells; ``app.bells.Bells`` in production. Never raises: a lost bell is rung again by the scan."""

    def ring(self, bell: Bell) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Services:
    settings: Settings
    ledger: Ledger
    bells: Ringer
    model: ServedModel
    node: WebNode
    process: Process
    seats: threading.BoundedSemaphore
    """One for each answer that may be open at once: ``web_threads``. gunicorn has some threads more."""

    def close(self) -> None:
        """End the threads and give the connections back."""
        self.node.stop()
        self.bells.close()
        self.ledger.close()


def services() -> Services:
    """The services of the app that handles the current request."""
    return cast(Services, current_app.extensions[KEY])
