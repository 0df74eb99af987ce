"""The Celery app. `celery -A celery_config worker -Q prefill -n prefill1@%h` (or decode, control); beat; flower.

A worker's role is the queue it serves. Pool and engine are named by string, so that beat and Flower stay light.
"""

from celery import Celery
from kombu import Exchange, Queue

from app.bells import broker_options
from app.settings import get_settings

ROLES = ("prefill", "decode", "control")
settings = get_settings()

app = Celery("baton", broker=settings.effective_broker_url)
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
    broker_transport_options=broker_options(settings, socket_timeout_s=10.0),
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
    timezone="UTC",
)
