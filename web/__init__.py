"""The HTTP side of Baton: OpenAI's API in front of the ledger. Run it with

``gunicorn -c python:web.gunicorn_conf 'web:create_app()'``
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

from flask import Flask

from app.bells import BellLane, Bells, Broker
from app.crash import end_crashed
from app.errors import LedgerUnavailable
from app.ids import draw_id
from app.ledger.api import Ledger
from app.settings import Settings, get_settings
from web import body, chat, completions, drain, errors, health, idempotency, models_api, request_id, requests_api
from web.node import WebNode
from web.process import PROCESS
from web.served import ServedModel, load_served_model
from web.services import KEY, Services


def create_app(
    settings: Settings | None = None,
    ledger: Ledger | None = None,
    bells: Broker | None = None,
    model: ServedModel | None = None,
) -> Flask:
    """The Flask app of this process, with its threads started. Without arguments everything is the real one.

    ``app.extensions["baton"].close()`` ends the threads; gunicorn need not, they die with the process.

    Raises:
        StartupError: it cannot be served: settings, model, or a Redis that may evict. A ledger that is away is no
            error: ``/ready`` says so.
    """
    settings = settings or get_settings()
    model = model or load_served_model(settings)
    ledger = ledger or _connect(settings)
    incarnation = PROCESS.incarnation or settings.incarnation or draw_id()
    # A dead thread would mean silent answers: the process ends, and gunicorn starts another.
    on_crash = partial(end_crashed, f"web-{incarnation[:8]}")
    bells = bells or Bells(settings)
    bell_lane = BellLane(bells, on_crash)
    node = WebNode(settings, ledger, bell_lane, incarnation, model.fingerprint, on_crash)
    seats = threading.BoundedSemaphore(settings.web_threads)

    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.extensions[KEY] = Services(settings, ledger, bell_lane, model, node, PROCESS, bells.fault, seats)
    request_id.install(app)
    body.install(app)
    idempotency.install(app)
    errors.install(app)
    for module in (chat, completions, models_api, requests_api, health, drain):
        app.register_blueprint(module.blueprint)
    node.start()
    return app


def _connect(settings: Settings) -> Ledger:
    from app.ledger.redis import check_server, connect  # here: an embedded app may bring its own ledger

    with suppress(LedgerUnavailable):  # it may come later; a server that evicts is refused now
        check_server(settings)
    return connect(settings)
