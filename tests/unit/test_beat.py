"""Beat during an outage of the broker: one line when it begins, one when it ends."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from workers.beat import Scheduler


class Broker:
    away = False
    sent = 0

    def publish(self, *args: Any, **options: Any) -> Any:
        if self.away:
            raise OSError("connection refused")
        self.sent += 1
        return SimpleNamespace(id="1")


def test_an_outage_is_one_line_and_its_end_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    app, broker = Celery("test", broker="redis://127.0.0.1:1/0", set_as_current=False), Broker()
    monkeypatch.setattr(app, "send_task", broker.publish)
    scheduler = Scheduler(app, lazy=True, schedule_filename=str(tmp_path / "beat"))
    entry = scheduler.Entry(name="scan", task="control.scan", schedule=1.0, app=app)
    for away in (False, True, True, True, False, False, True):
        broker.away = away
        scheduler.apply_entry(entry, producer=object())
    assert broker.sent == 3
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(")")[-1] for line in lines] == [
        " does not answer: Couldn't apply scheduled task scan: connection refused",
        "the broker answers again",
        " does not answer: Couldn't apply scheduled task scan: connection refused",
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_the_celery_app_uses_it() -> None:
    from kombu.utils.imports import symbol_by_name

    from celery_config import app

    assert symbol_by_name(app.conf.beat_scheduler) is Scheduler
