"""The worker's command line. Every flag has an environment variable beside it; a flag wins.

The engine's flags are the fields of EngineConfig: `max_num_seqs` is --max-num-seqs and
WEIR_MAX_NUM_SEQS. Only REDIS_URL (or the file that REDIS_URL_FILE names) has no flag: a flag would show
its password to everybody on the machine.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine_worker.config import EngineConfig
from engine_worker.worker_config import WorkerConfig

WORKER_FLAGS: Final = (
    "worker_id", "lease_ms", "drain_grace_s", "redis_grace_s", "canary_s", "max_models", "model_sampling",
    "metrics_port", "metrics_host", "stall_s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    worker: WorkerConfig
    engine: dict[str, Any]
    """EngineConfig's fields but for `model_dir`."""
    model_spec: str
    """A directory, or whatever else the model store knows."""
    var_dir: Path
    """Where converted models are kept, in `models/`."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Exits with status 2 and a message that names the flag or the variable when something is malformed."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_worker", description="Serves one model from the queue."
    )
    source = _Source(parser, environ)
    source.add(
        "model",
        str,
        "what to serve: [NAME=]DIRECTORY, a GGUF file, or the default model's name",
        metavar="NAME=DIR",
    )
    source.add(
        "model_name", str, "what clients call it; else the NAME before =, else the last part of the path"
    )
    source.add("var_dir", Path, "where converted models are kept", default=Path("var"))
    source.add_fields(WorkerConfig, WORKER_FLAGS)
    engine_names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model_dir"]
    source.add_fields(EngineConfig, engine_names)
    given = source.read(argv)

    model = given.get("model") or parser.error("which model? give --model NAME=DIRECTORY or set WEIR_MODEL")
    before, equals, after = str(model).partition("=")
    spec = after if equals else before
    name = source.flags["model_name"] or (before if equals else given.get("model_name")) or Path(spec).name
    url = redis_url(environ, parser, "beside `make run`: `manage.py engine`")
    engine = {name: given[name] for name in engine_names if name in given}
    worker = {name: given[name] for name in WORKER_FLAGS if name in given}
    return Arguments(
        worker=WorkerConfig(model=name, redis_url=url, device=str(engine.get("device", "cpu")), **worker),
        engine=engine,
        model_spec=spec,
        var_dir=given["var_dir"],
    )


def redis_url(environ: Mapping[str, str], parser: argparse.ArgumentParser, otherwise: str) -> str:
    """What REDIS_URL says, or the file that REDIS_URL_FILE names. Exits as `parse` does where neither says anything;
    `otherwise`: what else to do then."""
    url = environ.get("REDIS_URL", "")
    if path := environ.get("REDIS_URL_FILE"):
        try:
            url = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            parser.error(f"REDIS_URL_FILE can't be read: {error}")
    return url or parser.error(f"which Redis? set REDIS_URL, or REDIS_URL_FILE; {otherwise}")


def _texts(config: type) -> dict[str, str]:
    """What is written under each field, by its name."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


class _Source:
    """Flags first, then the environment, then nothing: an absent value leaves the dataclass's default."""

    def __init__(self, parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
        self._parser = parser
        self._environ = environ
        self._kinds: dict[str, Callable[[str], Any]] = {}
        self._choices: dict[str, tuple[str, ...]] = {}
        self._defaults: dict[str, Any] = {}
        self.flags: dict[str, Any] = {}

    def add(
        self, name: str, hint: Any, text: str, *, default: Any = None, metavar: str | None = None
    ) -> None:
        kind, choices = _kind(hint)
        self._kinds[name], self._choices[name] = kind, choices
        if default is not None:
            self._defaults[name] = default
        self._parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            choices=choices or None,
            metavar=metavar,
            help=f"{text} (WEIR_{name.upper()})".replace("%", "%%"),
        )

    def add_fields(self, config: Any, names: Sequence[str]) -> None:
        """Those of a dataclass, told as they are there, with their defaults."""
        hints, texts = typing.get_type_hints(config), _texts(config)
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name in names:
            default = defaults[name]
            is_told = default not in (None, "", dataclasses.MISSING)
            self.add(name, hints[name], texts[name] + (f" Default: {default}." if is_told else ""))

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        self.flags = flags = vars(self._parser.parse_args(argv))
        values = dict(self._defaults)
        for name, kind in self._kinds.items():
            variable = f"WEIR_{name.upper()}"
            if flags[name] is not None:
                values[name] = flags[name]
            elif text := self._environ.get(variable):
                try:
                    values[name] = kind(text)
                except ValueError:
                    self._parser.error(f"{variable} must be {kind.__name__}, it is {text!r}")
                if self._choices[name] and values[name] not in self._choices[name]:
                    self._parser.error(
                        f"{variable} must be one of {', '.join(self._choices[name])}, it is {text!r}"
                    )
        return values


def true_or_false(text: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    except KeyError as error:
        raise ValueError(text) from error


def _kind(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...]]:
    """What makes an int, float, bool, str or Path of a text, and the choices of a Literal."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    if hint is bool:
        return true_or_false, ()
    assert isinstance(hint, type), hint
    return hint, ()
