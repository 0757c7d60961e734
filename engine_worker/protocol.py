"""The wire format between the gateway and the engine worker; what operators send: broker/commands.py.

Everything is MessagePack (https://msgpack.org) through `msgspec`. Unknown fields are ignored, so
a newer peer may add some; an unknown `v` is refused with `ProtocolVersionError`. Fields are never
renumbered or given a new meaning: that takes a new version. This module imports neither torch nor
Django.

Sequence numbers count output tokens: `Chunk.seq` is the index, from 0, of the chunk's first token
in the request's output. A reader expects `seq == tokens seen so far`; a smaller one is a repeat
and is dropped, a larger one means a gap, which the token log fills. Because the number follows
from the tokens alone, an attempt that resumes another's work continues the same numbering.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

PROTOCOL_VERSION: Final = 1

LOGPROBS_MAX: Final = 20
"""The most alternatives per position that a request may ask for."""
LEAST_REPETITION_PENALTY: Final = 0.01


class ProtocolError(Exception):
    """A message that can't be understood."""


class ProtocolVersionError(ProtocolError):
    """A message of a protocol version that this process does not speak."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"message has protocol version {found}, this process speaks {PROTOCOL_VERSION}: "
            "upgrade the older of gateway and worker"
        )
        self.found = found


def this_version() -> int:
    """For a message's field `v`."""
    # A factory and not a default: defaults are left out of the encoding, and the version must never be.
    return PROTOCOL_VERSION


class FinishReason:
    """Why a generation ended. Constants, not an enum: the wire carries plain strings."""

    STOP: Final = "stop"  # an end token or a stop string
    LENGTH: Final = "length"  # max_tokens or the context ran out
    CANCELLED: Final = "cancelled"  # the client left or pressed stop
    DEADLINE: Final = "deadline"  # its deadline passed, queued or running
    ERROR: Final = "error"  # see Finish.error


class Rung(IntEnum):
    """How far an engine has gone to keep its latency targets. The last two are the gateway's part."""

    NONE = 0
    SMALLER_CHUNKS = 1
    FEWER_SEQUENCES = 2
    NO_SPECULATION = 3
    SHORTER_ANSWERS = 4
    """Low tiers (all but rank 0) that name no max_tokens get short answers."""
    REFUSING = 5
    """Low tiers are refused, with a time to come back."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to choose the next token. Validated at the gateway, obeyed at the engine."""

    max_tokens: int
    """At most this many output tokens; 0 computes the prompt and nothing more."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus: the smallest set whose probability reaches top_p (Holtzman et al., 2020)."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest."""
    repetition_penalty: float = 1.0
    """CTRL's (Keskar et al., 2019), over prompt and output; 1 is off."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """No end token and no stop string before this many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Never completed in the output, as far as the tokenizer writes them as it would alone or after a space."""
    ignore_eos: bool = False
    seed: int = 0
    """Noise is a counter-based function of (seed, position). The gateway draws one when the client gave none."""
    logprobs: int | None = None
    """Alternatives to report per output token (0 reports only the chosen one); None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    grammar: str = ""
    """What the output must follow, in llguidance's serialisation; empty: anything."""
    n: int = 1
    """Choices to make. The worker runs each as a sequence of its own, with a seed of its own."""


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Gateway -> queue -> worker: one generation."""

    request_id: str
    model: str
    tenant_id: str
    """The tenant's public id."""
    tier: str
    tier_rank: int
    """0 goes first."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    created_at_ms: int
    """Unix time, milliseconds, of the Redis server's clock where it orders, of the gateway's else."""
    deadline_ms: int
    """Unix time, milliseconds, after which the answer is worth nothing."""
    reply_channel: str
    """The live channel of the gateway process that holds the client's connection."""
    reservation_id: str = ""
    key_id: str | None = None
    """The API key's public id; None for the console's chat."""
    user_id: str | None = None
    endpoint: str = ""
    """The route that asked, for the ledger: `chat.completions`, `completions`, `ws.chat`."""
    cache_salt: str = ""
    """Who may find this prompt in a prefix cache: made by the gateway, never the client's own words."""
    adapter: str = ""
    """A LoRA adapter of the model; "": none."""
    is_streamed: bool = True
    """False: its client waits for the whole answer, so the tokens of several steps may be published together."""
    continues_text: bool = False
    """Whether the output's text goes on from the prompt's, as a completion's does; a chat's begins anew."""
    text_lengths: list[int] = []
    """For an embedding model: how many of the prompt's tokens are each text's, in order; empty: one text."""
    trace: dict[str, str] = {}
    """W3C Trace Context headers, and the client's `x-request-id`, by which the logs of both processes meet."""
    v: int = msgspec.field(default_factory=this_version)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate: natural-log probability of the raw model distribution (before temperature)."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token and the likeliest alternatives at one output position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None
    """Of a prompt's token: its place among all of the vocabulary, from 1."""


class EngineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request failed, in words that may be shown to the client."""

    code: str
    message: str


class Finish(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The end of a generation, with exact counts."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed by speculation, and how many of them were right."""
    accepted_tokens: int = 0
    stop_reason: str | int | None = None
    """The stop string or the stop token id that matched; None for the model's own end token."""
    error: EngineError | None = None


class ChoiceEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of one of several choices."""

    reason: str
    stop_reason: str | int | None = None


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker -> token log and live channel: what one engine step added to one request.

    `text` is what became printable in this step; it may be empty (a stop string may be forming, a
    character may be incomplete) and the last chunk may carry text without tokens.
    """

    request_id: str
    epoch: int
    """Counts claims of this request, from 1: a worker whose epoch is old has lost the request."""
    seq: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[PositionLogprobs] | None = None
    finish: Finish | None = None
    index: int = 0
    """Which choice this belongs to. `seq` counts the tokens of all choices together."""
    choice_end: ChoiceEnd | None = None
    """Set in a choice's last chunk where there are several; `finish` is the end of all."""
    prompt_logprobs: list[PositionLogprobs] | None = None
    """Of the prompt's second token and all that follow; in the first chunk, where asked for."""
    embedding: str | None = None
    """Of an embedding model, in the only chunk: the texts' vectors one after the other, little-endian float32
    in base64. Text, because Redis's MessagePack knows no bytes."""
    queued_ms: int | None = None
    """In the queue before a worker first had it; in an attempt's first chunk."""
    v: int = msgspec.field(default_factory=this_version)


class UsageEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is billed: exactly one per request, whatever its end. Lives in a Redis stream until the ledger has it."""

    request_id: str
    tenant_id: str
    model: str
    tier: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    created_at_ms: int
    finished_at_ms: int
    cached_tokens: int = 0
    key_id: str | None = None
    user_id: str | None = None
    endpoint: str = ""
    reservation_id: str = ""
    claimed_at_ms: int | None = None
    first_token_at_ms: int | None = None
    worker_id: str | None = None
    attempts: int = 0
    error_code: str | None = None
    error_message: str | None = None
    """For the log; the ledger keeps the code."""
    decision: str = ""
    """Why it was admitted, as the gateway wrote it down; kept with the ledger's row, read by nobody on the way."""
    v: int = msgspec.field(default_factory=this_version)


def charged_prompt_tokens(*, finish_reason: str, prompt_tokens: int, completion_tokens: int) -> int:
    """The part of the prompt that is charged: nothing of one that failed, or waited in vain, before its first token.

    What no worker ever claimed has no prompt tokens to begin with: the broker says so in the event.
    """
    if finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE) and completion_tokens == 0:
        return 0
    return prompt_tokens


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a model's makers want it sampled, in `SamplingParams`' terms; None: they say nothing."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10.0)] | None = None


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker -> Redis: what the gateway must know of a served model to render, tokenise and validate for it."""

    model: str
    """The name that clients use."""
    revision: str
    """Hash of the weights' source."""
    architecture: str
    context_length: int
    vocab_size: int
    """Ids at or above it are never sampled and never accepted."""
    eos_token_ids: list[int]
    tokenizer_sha256: str
    """Names the blob with the bytes of `tokenizer.json`."""
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    """Where a request names nothing, and the operator neither."""
    dtype: str = "float32"
    kind: str = "generate"
    """Or `embedding`: each text gives one vector."""
    dimensions: int = 0
    """Of an embedding model's vectors."""
    adapters: dict[str, str] = {}
    """LoRA adapters by name, each with the public id of the tenant that it is for; "": for all."""
    v: int = msgspec.field(default_factory=this_version)


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker -> Redis, about once a second: the heartbeat. Progress, not a port, is health."""

    worker_id: str
    model: str
    device: str
    started_at_ms: int
    updated_at_ms: int
    steps: int
    """Engine steps since start."""
    running: int
    waiting: int
    max_num_seqs: int
    kv_blocks_total: int
    kv_blocks_used: int
    step_ms: float
    """Moving average of the step time."""
    draining: bool = False
    goes_for_good: bool = False
    """It drains, and nobody will start it again: somebody unloaded its model."""
    rung: int = 0
    """See Rung."""
    kv_blocks_cached: int = 0
    prompt_tokens: int = 0
    """Since start, as the six below."""
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed by speculation, and how many of them were right."""
    accepted_tokens: int = 0
    preemptions: int = 0
    peak_memory_bytes: int = 0
    ttft_ms: tuple[float, float, float] | None = None
    """P50, P90, P99 of the last thousand requests in the engine; None before the first."""
    itl_ms: tuple[float, float, float] | None = None
    """The same of the last thousand times between two tokens; several that came at once share their wait."""
    queue_ms: tuple[float, float, float] | None = None
    """And of the last thousand requests: in the engine before their first step, from there to the first token, and
    from that to the last."""
    prefill_ms: tuple[float, float, float] | None = None
    decode_ms: tuple[float, float, float] | None = None
    host: str = ""
    pid: int = 0
    v: int = msgspec.field(default_factory=this_version)


class StartStage:
    """What a worker is at before it serves."""

    LOADING: Final = "loading"
    COMPILING: Final = "compiling"
    """Its kernels, once per machine; or it waits for a process that does."""


class WorkerStarting(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Worker -> Redis, about once a second until it serves."""

    worker_id: str
    model: str
    stage: str
    """See StartStage; there may be others."""
    for_s: float
    """At this stage, so far."""
    v: int = msgspec.field(default_factory=this_version)


_Message = TypeVar("_Message", bound=msgspec.Struct)


class _Versioned(msgspec.Struct):
    v: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_VERSION_DECODER = msgspec.msgpack.Decoder(_Versioned)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of any message of this module."""
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """The message of type `kind` in `data`.

    Raises:
        ProtocolVersionError: the message is of another protocol version.
        ProtocolError: it is not such a message at all.
    """
    try:
        version = _VERSION_DECODER.decode(data).v
        if version != PROTOCOL_VERSION:
            raise ProtocolVersionError(version)
        message: _Message = _decoder(kind).decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error
    return message
