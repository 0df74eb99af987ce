"""Fetches and converts the model: ``python -m app.launcher.prepare``, run once by ``baton up`` before anything else.

A process of its own, because a conversion takes the memory of the whole model, and so that Ctrl-C ends it at once.
It writes lines that start with one of the words below; all others are for the log.
"""

from __future__ import annotations

import sys

from app.errors import StartupError
from app.launcher.model_facts import model_facts
from app.model.limits import LengthLimits
from app.model.resolve import resolve_model
from app.settings import get_settings

PROGRESS = "progress: "
RESULT = "model: "
ERROR = "error: "


def main() -> int:
    """Make the model ready in the cache and say what it is."""
    try:
        settings = get_settings()
        folder = resolve_model(settings.model, settings.home, lambda line: print(PROGRESS + line, flush=True))
        LengthLimits.of(settings, folder.config)  # for its error, before anything else is started
        facts = model_facts(folder.name, str(folder.path), folder.config)
    except StartupError as error:
        print(ERROR + " ".join(str(error).split()), flush=True)
        return 1
    print(RESULT + facts.model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
