"""Celery's tasks of people and tenants: each calls one service. Idempotent, with a time limit."""

from __future__ import annotations

from celery import shared_task

from tenants.services.data_copies import write_copies
from tenants.services.deletion import purge_due_tenants
from tenants.services.invitations import mail_invitations


@shared_task(name="tenants.tasks.mail_invitations", soft_time_limit=200, time_limit=240, ignore_result=True)
def mail() -> None:
    """Links that wait to be mailed; the rows are the queue."""
    mail_invitations()


@shared_task(name="tenants.tasks.purge", soft_time_limit=240, time_limit=270, ignore_result=True)
def purge() -> None:
    """Tenants whose days of grace are over; each is deleted whole or not at all."""
    purge_due_tenants()


@shared_task(name="tenants.tasks.copy_data", soft_time_limit=240, time_limit=270, ignore_result=True)
def copy_data() -> None:
    """Copies of tenants' data that owners asked for; the rows are the queue."""
    write_copies()
