"""Ends what waits for a model that nobody serves any more, within about a second of its end.

Who asks anew hears it at once; what was queued before asks for nothing any more. So each gateway looks at the models of
its open generations once a second, and only while there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inference.generation_watch import GenerationWatch
from inference.models_served import ModelCatalogue

if TYPE_CHECKING:
    from inference.services.generation import Generation


class WorkerWatch(GenerationWatch):
    INTERVAL_S = 1.0

    def __init__(self, models: ModelCatalogue) -> None:
        super().__init__()
        self._models = models

    async def _look(self, running: Sequence[Generation]) -> None:
        await self._models.look()
        for generation in running:
            await generation.give_up_without_worker()
