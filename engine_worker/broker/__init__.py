"""Priority queue, leases, token log and live tokens in Redis: Lua beside the Python that binds it.

Imports neither torch nor Django: the gateway uses it as well as the worker.
"""

from engine_worker.broker.control import ControlBroker
from engine_worker.broker.entry import Entry, Terms, entry_of
from engine_worker.broker.errors import (
    BrokerError,
    BrokerUnavailable,
    DuplicateRequestId,
    QueueFull,
    TokenizerMissing,
    UnknownRequest,
)
from engine_worker.broker.gateway import Account, Enqueued, GatewayBroker, KnownModels, RequestState
from engine_worker.broker.keys import live_channel
from engine_worker.broker.live import GAP, Channel, Gap, LiveChannel
from engine_worker.broker.operator import DeadLetter, ModelQueue, OperatorBroker, TenantLine, TierQueue
from engine_worker.broker.usage import EntryRef, UsageReader
from engine_worker.broker.worker import Claim, Held, Verdict, WorkerBroker

__all__ = [
    "GAP",
    "Account",
    "BrokerError",
    "BrokerUnavailable",
    "Channel",
    "Claim",
    "ControlBroker",
    "DeadLetter",
    "DuplicateRequestId",
    "Enqueued",
    "Entry",
    "EntryRef",
    "Gap",
    "GatewayBroker",
    "Held",
    "KnownModels",
    "LiveChannel",
    "ModelQueue",
    "OperatorBroker",
    "QueueFull",
    "RequestState",
    "TenantLine",
    "Terms",
    "TierQueue",
    "TokenizerMissing",
    "UnknownRequest",
    "UsageReader",
    "Verdict",
    "WorkerBroker",
    "entry_of",
    "live_channel",
]
