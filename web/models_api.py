"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from app.errors import ModelNotFound
from web.services import services

blueprint = Blueprint("models", __name__)


@blueprint.get("/v1/models")
def list_models() -> Response:
    return jsonify({"object": "list", "data": [services().model.describe()]})


@blueprint.get("/v1/models/<path:name>")
def retrieve_model(name: str) -> Response:
    model = services().model
    if name != model.name:
        raise ModelNotFound(f"the model {name!r} does not exist; this server has {model.name!r}", param="model")
    return jsonify(model.describe())
