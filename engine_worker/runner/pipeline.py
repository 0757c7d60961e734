"""Steps whose tokens stay on the device: each is launched before the host knows what the one before has chosen.

Every row is chosen by the graphs, but those whose choice needs the host: a grammar's mask, log probabilities, bad
words of several tokens, more changed logits than there is room for. Their logits come to the reference sampler,
which the host waits for; whether a row is one of them depends on its own request alone, but for that room. Prompts
that are scored and guesses that are verified need several tokens of a sequence: such a step is the reference's whole.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future

from engine_worker.config import EngineConfig
from engine_worker.engine.device import Device, Flight, InlineDevice, ThreadDevice
from engine_worker.engine.executor import Executor, Result, StepAbandoned, rows_of
from engine_worker.engine.meter import Meter
from engine_worker.engine.row import Row
from engine_worker.engine.sampler import Sampled, Sampler
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.sequence import Choice
from engine_worker.engine.swap import Move
from engine_worker.runner.decode_numbers import KNOWN
from engine_worker.runner.gpu_decoder import GpuDecoder
from engine_worker.runner.gpu_sampler import MAX_CHANGES, Choosing
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.runner.packing import Packed, pack
from engine_worker.runner.rings import Told

Finish = Callable[[], list[Result]]


def pipeline(config: EngineConfig, runner: ModelRunner, sampler: Sampler, meter: Meter) -> Device:
    """Of a runner on a GPU, or on its twin."""
    decoder = runner.decoder
    assert isinstance(decoder, GpuDecoder)
    executor = Pipeline(runner, decoder, sampler, meter, block_size=config.block_size)
    return PipelineDevice(executor) if config.overlaps() else InlineDevice(executor)


class Pipeline(Executor):
    """`run` is the whole of a step; `launch` its beginning, for the step before to be looked at meanwhile."""

    def __init__(
        self, runner: ModelRunner, decoder: GpuDecoder, sampler: Sampler, meter: Meter, *, block_size: int
    ) -> None:
        super().__init__(runner, sampler, meter)
        self._decoder = decoder
        self._block_size = block_size
        self._last: _Launched | None = None

    def run(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> list[Result]:
        return self.launch(plan, moves)()

    def launch(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> Finish:
        """What is returned waits for the step's results. Raises what the step can't be launched for."""
        before, self._last = self._last, None
        if moves:
            self._move(moves)
        if not plan:
            return list
        if any(item.draft or item.sequence.is_scoring for item in plan):
            _land(before)
            results = super().run(plan)
            self._meter.padding_tokens = self._decoder.padding_tokens
            return lambda: results
        with self._meter.phase("compute"):
            self._last = launched = self._launch(plan, before)
        self._meter.padding_tokens = self._decoder.padding_tokens
        return launched.results

    def _launch(self, plan: Rows[Scheduled], before: _Launched | None) -> _Launched:
        choosing, by_host = self._choosing(plan)
        if any(item.awaits is not None for item in by_host.values()):
            _land(before)
        packed = pack(plan, self._block_size)
        self._decoder.launch(
            packed.token_ids, packed.positions, packed.segments, packed.sampled, _sources(packed, before)
        )
        samples = [item for item in plan if item.samples]
        told = self._decoder.choose(choosing) if samples else None
        return _Launched(plan, told, self._by_host(by_host))

    def _choosing(self, plan: Rows[Scheduled]) -> tuple[list[Choosing], dict[int, Scheduled]]:
        """Of each row that samples; and the rows that the host chooses for."""
        choosing: list[Choosing] = []
        by_host: dict[int, Scheduled] = {}
        room = MAX_CHANGES
        for item in plan:
            if not item.samples:
                continue
            sequence, length = item.sequence, item.known + (item.awaits is not None)
            changes = _changes(sequence, length - sequence.num_prompt)
            if _needs_host(sequence) or len(changes) > room:
                by_host[len(choosing)], changes = item, []
            room -= len(changes)
            blocks = item.blocks[: -(-length // self._block_size)]
            choosing.append(Choosing(sequence.sampling, sequence.num_prompt, length, blocks, changes))
        return choosing, by_host

    def _by_host(self, items: dict[int, Scheduled]) -> dict[int, Sampled]:
        """Chosen by the reference sampler, which waits for the logits; by row."""
        if not items:
            return {}
        logits = self._decoder.logits(list(items))
        with self._meter.phase("sample"):
            chosen = self._sampler.sample(logits, [rows_of(item)[0] for item in items.values()])
        for item, sampled in zip(items.values(), chosen, strict=True):
            assert item.chooses is not None
            item.chooses.token_id = sampled.token_id or 0
        return dict(zip(items, chosen, strict=True))


class _Launched:
    """A step that computes, or has."""

    def __init__(self, plan: Rows[Scheduled], told: Told | None, by_host: dict[int, Sampled]) -> None:
        self._plan, self._told, self._by_host = plan, told, by_host
        samples = (item.chooses for item in plan if item.chooses is not None)
        self.rows: dict[Choice, int] = {choice: row for row, choice in enumerate(samples)}

    def results(self) -> list[Result]:
        """Waits. May be asked for by both threads, and gives the same."""
        tokens = iter(enumerate(self._told.values() if self._told is not None else ()))
        results = []
        for item in self._plan:
            sampled: list[Sampled] = []
            if item.chooses is not None:
                row, token = next(tokens)
                sampled.append(self._by_host.get(row) or Sampled(token if token >= 0 else None))
                # Where there is none the sequence fails, and what the next step makes of it is dropped.
                item.chooses.token_id = sampled[0].token_id or 0
            results.append(Result(sampled))
        return results


class PipelineDevice(ThreadDevice):
    """Launches in a thread of its own; whoever asks for a step's results waits for the device, not for launches."""

    executor: Pipeline

    def __init__(self, executor: Pipeline) -> None:
        super().__init__(executor)

    def launch(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> Flight:
        return _Landing(self._run(lambda: self.executor.launch(plan, moves)))


class _Landing:
    def __init__(self, launched: Future[Finish]) -> None:
        self._launched = launched

    def result(self) -> list[Result]:
        return self._launched.result()()


def _land(before: _Launched | None) -> None:
    """Its tokens are known when this returns."""
    if before is not None:
        before.results()


def _sources(packed: Packed, before: _Launched | None) -> list[int]:
    """Of each token: where on the device it is. Raises StepAbandoned where the step before has not made it."""
    sources = [KNOWN] * len(packed.token_ids)
    rows = before.rows if before is not None else {}
    for at, choice in packed.unknown.items():
        if choice not in rows:
            raise StepAbandoned
        sources[at] = rows[choice]
    return sources


def _needs_host(row: Row) -> bool:
    return (
        row.matcher is not None
        or row.sampling.logprobs is not None
        or any(len(word) > 1 for word in row.bad_words)
    )


def _changes(row: Row, num_output: int) -> list[tuple[int, float]]:
    """What `engine/penalties.py` does to single tokens, whatever the others are."""
    changes = list(row.sampling.logit_bias.items())
    changes += [(word[0], -float("inf")) for word in row.bad_words if len(word) == 1]
    if num_output < row.sampling.min_tokens:
        changes += [(token, -float("inf")) for token in row.stop_ids]
    return changes
