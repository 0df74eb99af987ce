"""``python -m web.report_exit INCARNATION``: tell the ledger that a web worker has ended."""

from __future__ import annotations

import logging
import sys

from app.errors import LedgerError
from app.ledger.redis import connect
from app.protocol.commands import ReportExit
from app.settings import get_settings

logger = logging.getLogger("web")


def main(incarnation: str) -> None:
    settings = get_settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    ledger = connect(settings)
    try:
        while ledger.execute(ReportExit(incarnation)).more:  # rings nothing: web owns no attempts, it only watches
            pass
        logger.info("web worker %s has left the ledger", incarnation)
    except LedgerError as error:
        logger.warning("the exit of web worker %s is left to its heartbeat: %s", incarnation, error)
    finally:
        ledger.close()


if __name__ == "__main__":
    main(sys.argv[1])
