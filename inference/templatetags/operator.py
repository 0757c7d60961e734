"""What the operator's pages write."""

from __future__ import annotations

from urllib.parse import urlencode

from django import template

from engine_worker.broker.operator import DeadLetter
from inference.fleet import own_names

register = template.Library()


@register.filter
def letter_query(letter: DeadLetter) -> str:
    """Which dead letter a button means."""
    return urlencode({"model": letter.model, "request_id": letter.request_id, "tenant": letter.tenant_id})


@register.simple_tag
def model_names() -> list[str]:
    """What a price, a limit or an alias can be of."""
    return own_names()
