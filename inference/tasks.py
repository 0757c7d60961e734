"""Celery's tasks: each calls one service. Idempotent, with a time limit."""

from __future__ import annotations

from celery import shared_task

from inference import batch_runner
from inference.services.alerts import mail_alerts, raise_alerts
from inference.services.exports import write_exports
from inference.services.files import delete_expired_files
from inference.services.idempotency import delete_expired_requests
from inference.services.partitions import drop_old_months, make_partitions_ahead
from inference.services.responses import delete_expired_responses
from inference.services.usage import drain_usage_stream
from inference.services.webhook_delivery import queue_deliveries, send_deliveries
from inference.services.worker_commands import settle_commands as settle


@shared_task(name="inference.tasks.drain_usage", soft_time_limit=45, time_limit=60, ignore_result=True)
def drain_usage() -> None:
    """Usage stream to ledger; the timetable runs it every couple of seconds."""
    drain_usage_stream()


@shared_task(name="inference.tasks.make_partitions", soft_time_limit=45, time_limit=60, ignore_result=True)
def make_partitions() -> None:
    """The ledger's coming months, and those that are kept no longer; once a day is plenty."""
    make_partitions_ahead()
    drop_old_months()


@shared_task(name="inference.tasks.alert", soft_time_limit=200, time_limit=240, ignore_result=True)
def alert() -> None:
    """Budgets, keys that end, unusual spend; told once each."""
    raise_alerts()
    queue_deliveries()
    mail_alerts()


@shared_task(name="inference.tasks.send_webhooks", soft_time_limit=80, time_limit=100, ignore_result=True)
def send_webhooks() -> None:
    """What waits to be sent to webhooks, as far as it is due; the rows are the queue."""
    send_deliveries()


@shared_task(name="inference.tasks.delete_expired", soft_time_limit=200, time_limit=240, ignore_result=True)
def delete_expired() -> None:
    """Stored responses, files and idempotent answers whose time is over; once a day."""
    delete_expired_responses()
    delete_expired_files()
    delete_expired_requests()


@shared_task(name="inference.tasks.run_batches", soft_time_limit=200, time_limit=240, ignore_result=True)
def run_batches() -> None:
    """Open batches; the timetable runs it every few seconds, and all but one return at once."""
    batch_runner.run_batches()


@shared_task(name="inference.tasks.export", soft_time_limit=240, time_limit=270, ignore_result=True)
def export() -> None:
    """Reports that were asked for as files; the rows are the queue."""
    write_exports()


@shared_task(name="inference.tasks.settle_commands", soft_time_limit=25, time_limit=30, ignore_result=True)
def settle_commands() -> None:
    """What workers answered to operators' commands, and which they never will."""
    settle()
