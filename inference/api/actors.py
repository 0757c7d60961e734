"""Who makes a change through the API: the key, at its client's address."""

from __future__ import annotations

from inference.api.endpoint import ApiCall
from tenants.client_address import client_address
from tenants.selectors import get_api_key
from tenants.services import Actor


def key_actor(call: ApiCall) -> Actor:
    """Takes a query."""
    assert call.principal.key_public_id is not None
    api_key = get_api_key(call.principal, call.principal.key_public_id)
    return Actor.key(api_key, ip_address=client_address(call.request))
