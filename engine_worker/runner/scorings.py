"""How each layer of a model scores, as `transformers` hands it to its attention: each family keeps it elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine_worker.attention.interface import PLAN, Scoring


class _Asked:
    """An attention plan that only notes how each layer scores."""

    def __init__(self) -> None:
        self.scorings: dict[int, Scoring] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.scorings[layer] = scoring
        return torch.zeros_like(query)


@torch.inference_mode()
def scorings(model: PreTrainedModel) -> list[Scoring]:
    """By layer. In a group all processes have to ask."""
    asked = _Asked()
    one_token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model.model(input_ids=one_token, position_ids=one_token, use_cache=False, **{PLAN: asked})
    return [asked.scorings[layer] for layer in range(len(asked.scorings))]
