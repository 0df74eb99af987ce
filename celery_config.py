"""The Celery app. `celery -A celery_config worker -Q prefill -n prefill1@%h` (or decode, control); beat; flower.

A worker's role is the queue it serves. Pool and engine are named by string, so that beat and Flower stay light.
"""

import sys
from typing import Any

import click
from celery import Celery
from celery.signals import celeryd_init
from kombu import Exchange, Queue

from app.broker import Amqp, broker_options
from app.settings import get_settings

ROLES = ("prefill", "decode", "control")
settings = get_settings()

app = Celery("baton", broker=settings.effective_broker_url, amqp=Amqp)
app.conf.update(
    include=["workers.prefill", "workers.decode", "workers.control"],
    worker_pool="workers.pool:NodePool",
    # Bells in flight: one per sequence that a node works on, and a few that find nothing to do.
    worker_concurrency=settings.max_num_seqs + 8,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    worker_direct=True,
    worker_send_task_events=True,
    task_send_sent_event=True,
    task_ignore_result=True,
    task_acks_late=False,
    task_queues=[Queue(name, Exchange(name), routing_key=name) for name in ROLES],
    task_create_missing_queues=False,
    task_routes={f"{name}.*": {"queue": name} for name in ROLES},
    broker_transport_options=broker_options(settings),
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # An error reply to BRPOP (failover, full disk, too few replicas) is no reason to end: the worker connects again.
    broker_channel_error_retry=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    worker_enable_remote_control=True,
    task_default_delivery_mode="transient",
    beat_schedule={
        "scan": {
            "task": "control.scan",
            "schedule": settings.scan_s,
            # With no control worker alive the ticks must not pile up; and Flower need not show each one.
            "options": {"queue": "control", "expires": 2 * settings.scan_s, "ignore_result": True},
        }
    },
    beat_max_loop_interval=1,
    beat_scheduler="workers.beat:Scheduler",
    timezone="UTC",
)

_command = click.get_current_context(silent=True)
if _command is not None:  # `celery -A celery_config …`: where no -l is given, our own setting holds
    _command.default_map = {name: {"loglevel": settings.log_level} for name in ("worker", "beat")}


@celeryd_init.connect
def check_queues(options: dict[str, Any], **_: Any) -> None:
    """End a worker that is to serve a queue which does not exist with one line; Celery would end with a traceback."""
    queues = options.get("queues") or ()
    unknown = set(queues.split(",") if isinstance(queues, str) else queues) - set(ROLES)
    if unknown:
        sys.exit(f"baton: -Q {','.join(sorted(unknown))}: a worker serves exactly one of {', '.join(ROLES)}")
