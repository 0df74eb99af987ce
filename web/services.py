"""What the routes of one web process share. Made once by ``create_app``, found through the Flask app."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from flask import current_app

from app.bells import BellLane
from app.ledger.api import Ledger
from app.settings import Settings
from web.node import WebNode
from web.process import Process
from web.served import ServedModel

KEY = "baton"


@dataclass(frozen=True)
class Services:
    settings: Settings
    ledger: Ledger
    bells: BellLane
    model: ServedModel
    node: WebNode
    process: Process
    broker_fault: Callable[[], str]
    """Asks the broker; why it takes no messages, or nothing. May wait for seconds."""
    seats: threading.BoundedSemaphore
    """One for each answer that may be open at once: ``web_threads``. gunicorn has some threads more."""

    def close(self) -> None:
        """End the threads and give the connections back."""
        self.node.stop()
        self.ledger.close()


def services() -> Services:
    """The services of the app that handles the current request."""
    return cast(Services, current_app.extensions[KEY])
