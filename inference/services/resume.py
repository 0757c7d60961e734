"""A generation taken up again: by another connection, at any gateway, until its log's retention ends."""

from __future__ import annotations

from engine_worker.broker import UnknownRequest
from engine_worker.broker.gateway import RequestState
from inference.errors import NotFound
from inference.runtime import Runtime
from inference.services.generation import Generation, Ticket
from tenants.principal import Principal


async def find_request(
    runtime: Runtime, principal: Principal, request_id: str, *, model: str | None = None
) -> tuple[str, RequestState]:
    """The tenant's request and its model. Raises NotFound, for another tenant's as for none, and BrokerUnavailable."""
    try:
        if model is None:
            model = await runtime.broker.model_of(request_id)
        state = await runtime.broker.request_state(model, request_id)
        if state.tenant_id != principal.tenant_public_id:
            raise UnknownRequest(request_id)
    except UnknownRequest as error:
        raise NotFound(
            "There is no such generation, or it ended too long ago to be read. What it used is known for longer: "
            "GET /v1/requests/{id}/explain.",
            code="request_not_found",
            param="request_id",
        ) from error
    return model, state


async def resume(
    runtime: Runtime, principal: Principal, request_id: str, *, model: str | None = None, from_seq: int = 0
) -> Generation:
    """The generation's chunks from that token on, those to come included. Raises NotFound, BrokerUnavailable.

    It is settled by the ledger, not here: what was promised at its start only its first gateway knows.
    """
    model, _ = await find_request(runtime, principal, request_id, model=model)
    runtime.detached.resume(request_id)
    stream = await runtime.streams.open(model, request_id, from_seq=from_seq)
    try:
        await runtime.broker.attach(model, request_id, runtime.streams.channel)
    except UnknownRequest as error:
        stream.close()
        raise NotFound(
            "This generation has just been forgotten. Ask again.", code="request_not_found"
        ) from error
    except BaseException:
        stream.close()
        raise
    return Generation(
        runtime=runtime,
        ticket=Ticket(
            request_id=request_id,
            model=model,
            tenant_id=principal.tenant_public_id,
            reservation_id="",
            lifetime_s=principal.tier.deadline_s,
            waits_for_worker=True,  # who reads on does not end what others may wait for
        ),
        stream=stream,
    )
