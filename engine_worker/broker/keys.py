"""The key layout of the broker. Every key of one call shares the hash tag `{m:MODEL}`, so that a
script runs on one node of a cluster. (On a single server a gateway reserves of its tenant's limits, `{t:TENANT}`, and
queues the request in one call: tenants/quotas/lua/then.lua.)

Scripts get the model's prefix as KEYS[1] and derive the rest from it, because which request, tier
or tenant comes next is decided inside them. That is safe on a cluster: a derived key begins with
the prefix, so it carries the same tag and lies in the same slot.

    weir:{m:MODEL}:...    kind    what                                       lives until
    req:ID                hash    one request: body, state, epoch, counts    retention after its end (1)
    log:ID                list    its Chunks, in order                       retention after its end (1)
    tiers                 zset    tier ranks with a backlog                  empty (2)
    tier:RANK             zset    queued ids by arrival                      empty (2)
    turns:RANK            zset    tenants with a backlog by their counter    empty (2)
    line:RANK:TENANT      zset    a tenant's queued ids by arrival           empty (2)
    served:RANK           zset    every tenant's virtual token counter       24 h after the last arrival
    lengths:RANK          hash    output tokens of a tenant's requests of late, of all under ''  24 h after the last
    level:RANK            string  the counter at the tier's last turn        24 h after it
    pace:RANK:TENANT      string  ms per place in that line, of late         30 s
    interval              string  ms between two that leave the queue        1 h after the last
    moved                 string  when the last one left it, while others wait, ms      30 s
    passes                string  turns since lower tiers had to be let pass 24 h
    delayed               zset    ids in back-off by its end, server ms      empty (2)
    swept                 string  when the last sweep was, server ms         24 h after it
    silent                string  the last sweep before one missed its turn  3 s
    dead                  zset    dead ids by their death, server ms         24 h after the last (6)
    deadlines             zset    queued ids by deadline, server ms          empty (2)
    leases                zset    running ids by end of lease, server ms     empty (2)
    arrivals              string  arrival counter                            never (3)
    wake                  list    one token per piece of new work            60 s
    better                list    ranks of work better than what waited      5 s
    offers                zset    worker ids by how many they have room for  60 s after the last
    offer:ID              string  the lease of what may be handed to it, ms  so long it may be: 1.5 s
    usage                 stream  UsageEvents the ledger has not taken       acknowledged (4)
    card                  string  ModelCard                                  24 h after the last heartbeat
    withdrawn             string  its last worker was told to go for good    a worker registers (7)
    starting              string  WorkerStarting, of the last that said so   15 s after it
    workers               zset    worker ids by last heartbeat, server ms    60 s after the last heartbeat
    worker:ID             string  WorkerStatus                               15 s after its heartbeat

    hand:WORKER           pub/sub requests that the worker need not claim: see enqueue.lua

    outside any tag, by single commands
    weir:models           set     models that ever had a worker              never (5)
    weir:starting         set     models that have `starting`                found to be gone
    weir:tokenizer:SHA    string  bytes of a tokenizer.json                  24 h after the last heartbeat
    weir:control:WORKER   list    ModelCommands for a worker process         300 s after its last heartbeat
    weir:answer:COMMAND   list    its ModelAnswer                            24 h
    weir:processes        set     ids of worker processes that obey          found to be gone
    weir:process:WORKER   string  ProcessStatus                              15 s after its heartbeat
    weir:live:GATEWAY     pub/sub MessagePack arrays of Chunks

(1) While a request is alive these have no TTL: one that ran out would swallow the usage event. Each
request has a deadline and the sweep that every gateway and worker runs ends it, after which the TTL
counts. (2) Redis deletes an empty zset; each member is a live request, see (1). (3) A restart would
let new arrivals pass older ones. (4) It is money: only the ledger's acknowledgement removes an entry.
(5) Usage of a model whose workers are gone must still be found and drained. (6) And so long, not the
retention, are a dead request and its log kept, prompt included: an operator may queue it again. (7) It is
what the operator decided, however long ago, and no larger than the model's name in weir:models.
"""

from __future__ import annotations

from typing import Final

MODELS: Final = "weir:models"
STARTING: Final = "weir:starting"

CARD_TTL_S: Final = 24 * 3600
WORKER_TTL_MS: Final = 15_000
"""A worker whose heartbeat is older counts as gone."""


def model_prefix(model: str) -> str:
    """`weir:{m:MODEL}:`, the start of every key of the model."""
    if not model or "{" in model or "}" in model:
        raise ValueError(f"a model's name must not be empty or hold a brace: {model!r}")
    return f"weir:{{m:{model}}}:"


def tokenizer_key(sha256: str) -> str:
    return f"weir:tokenizer:{sha256}"


def hand_channel(model: str, worker_id: str) -> str:
    """Where a worker hears of requests that it need not claim."""
    return f"{model_prefix(model)}hand:{worker_id}"


def live_channel(gateway_id: str) -> str:
    """Where a gateway process hears the tokens of its requests: `GenerateRequest.reply_channel`."""
    return f"weir:live:{gateway_id}"
