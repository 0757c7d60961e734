"""One model over several processes, by `transformers`' tensor-parallel plans under torchrun.

The first rank is a worker like any other; the rest hold their share of weights and keys and compute what
the first one computes. It tells them each step before it computes it. A rank that fails takes the group
with it: torchrun ends the others, and whoever supervises torchrun starts all of them again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from engine_worker.attention.interface import Segment
from engine_worker.engine.errors import EngineDead, UnsupportedModel

if TYPE_CHECKING:
    from engine_worker.runner.decoder import Decoder

log = logging.getLogger(__name__)

_FOREVER: Final = timedelta(days=365)
"""An idle group waits for its next step. A rank that dies is noticed at once: its connections close."""

_told: list[Any] = []
"""The process group by which the first rank tells the others what to compute: on the host's network."""


def join(environ: Mapping[str, str], *, device: str) -> bool:
    """Whether torchrun started this process as one of several; then the group is complete when it returns."""
    if int(environ.get("WORLD_SIZE", "1")) < 2:
        return False
    if device != "cpu":
        torch.cuda.set_device(int(environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=_FOREVER)
    _told[:] = [dist.new_group(backend="gloo", timeout=_FOREVER)]
    return True


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_leader() -> bool:
    return size() == 1 or dist.get_rank() == 0


def share(count: int, what: str) -> int:
    """This rank's part of so many. Raises UnsupportedModel when they can't be divided."""
    if count % size():
        raise UnsupportedModel(f"{count} {what} can't be shared by {size()} processes")
    return count // size()


def share_heads(config: PretrainedConfig, count: int, what: str) -> int:
    """This rank's part of an attention's heads: all of them where the plan gathers what they are made of.

    So it is where query, key and value are one weight (Phi-3), which cut in parts would mix them: its ranks share
    weights and products, each attends for all.
    """
    plan = config.base_model_tp_plan or {}
    is_gathered = plan.get("layers.*.self_attn.qkv_proj") == "colwise_gather_output"
    return count if is_gathered else share(count, what)


def least(count: int) -> int:
    """The smallest of all ranks' counts."""
    if size() == 1:
        return count
    counts: list[Any] = [None] * size()
    dist.all_gather_object(counts, count, group=_told[0])
    return int(min(counts))


class Leader:
    """A decoder whose steps all ranks compute. See `decoder.Decoder`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return self._decoder.caches

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        try:
            _tell(("forward", (token_ids, positions, segments, sampled)))
            return self._decoder.forward(token_ids, positions, segments, sampled)
        except Exception as error:
            # The others may be anywhere in the step: nothing can be computed together any more.
            raise EngineDead(f"a process of the group failed: {error}") from error

    def scrub(self, blocks: Sequence[int]) -> None:
        _tell(("scrub", (blocks,)))
        self._decoder.scrub(blocks)

    def close(self) -> None:
        """Ends the others."""
        _tell(None)


def follow(decoder: Decoder) -> None:
    """Computes what the leader tells, until it closes. Raises when it is gone."""
    # The leader is told to stop as well, and still needs everybody for what it has begun.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    log.info("group.following rank=%d pid=%d", dist.get_rank(), os.getpid())
    while (message := _tell(None)) is not None:
        verb, arguments = message
        with torch.inference_mode():
            getattr(decoder, verb)(*arguments)


def _tell(message: Any) -> Any:
    """From the leader to all; the others' argument is not looked at."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=_told[0])
    return box[0]
