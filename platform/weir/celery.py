"""The Celery application and its timetable."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

from weir import celery_metrics  # noqa: F401 - connects to the signals

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")

app = Celery("weir")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.conf.beat_schedule = {
    "drain-usage": {
        "task": "inference.tasks.drain_usage",
        "schedule": 2.0,
        # One that could not run in time is worth nothing: the next does its work too.
        "options": {"expires": 10.0},
    },
    "alert": {"task": "inference.tasks.alert", "schedule": 60.0, "options": {"expires": 55.0}},
    "send-webhooks": {
        "task": "inference.tasks.send_webhooks",
        "schedule": 5.0,
        "options": {"expires": 4.0},
    },
    "export": {"task": "inference.tasks.export", "schedule": 5.0, "options": {"expires": 4.0}},
    "settle-commands": {
        "task": "inference.tasks.settle_commands",
        "schedule": 5.0,
        "options": {"expires": 4.0},
    },
    "mail-invitations": {
        "task": "tenants.tasks.mail_invitations",
        "schedule": 10.0,
        "options": {"expires": 9.0},
    },
    "copy-data": {
        "task": "tenants.tasks.copy_data",
        "schedule": 15.0,
        "options": {"expires": 14.0},
    },
    "purge-tenants": {
        "task": "tenants.tasks.purge",
        "schedule": crontab(minute="47"),
    },
    "make-partitions": {
        "task": "inference.tasks.make_partitions",
        "schedule": crontab(hour="3", minute="17"),
    },
    "run-batches": {
        "task": "inference.tasks.run_batches",
        "schedule": 5.0,
        "options": {"expires": 10.0},
    },
    "delete-expired": {
        "task": "inference.tasks.delete_expired",
        "schedule": crontab(hour="3", minute="37"),
    },
}
