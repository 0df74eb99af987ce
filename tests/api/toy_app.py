"""The real app with a toy model, for a real gunicorn: ``tests.api.toy_app:create_app()``."""

from __future__ import annotations

from flask import Flask

import web
from tests.api.support import HeardBells, toy_model


def create_app() -> Flask:
    return web.create_app(bells=HeardBells(), model=toy_model())
