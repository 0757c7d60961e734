"""What can go wrong between a process and the broker.

BrokerError
├── BrokerUnavailable     Redis does not answer, or refuses; nothing is known of the call's effect
├── TokenizerMissing      a model is registered, the tokenizer that it names is not (yet, or any more)
├── QueueFull             a bound is reached: the tier's, the tenant's, or the wait's; carries retry_after_ms
├── DuplicateRequestId    the id is queued, running or finished less than the retention ago
└── UnknownRequest        never seen, or its log's retention is over
"""

from __future__ import annotations

from typing import Literal

QueueScope = Literal["tier", "tenant", "wait"]


class BrokerError(Exception):
    pass


class BrokerUnavailable(BrokerError):
    pass


class TokenizerMissing(BrokerError):
    pass


class QueueFull(BrokerError):
    def __init__(self, scope: QueueScope, retry_after_ms: int) -> None:
        super().__init__(f"the queue is full by the bound of the {scope}, retry in {retry_after_ms} ms")
        self.scope: QueueScope = scope
        self.retry_after_ms = retry_after_ms


class DuplicateRequestId(BrokerError):
    pass


class UnknownRequest(BrokerError):
    pass
