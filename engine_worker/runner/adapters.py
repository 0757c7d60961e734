"""LoRA adapters (Hu et al., 2021, arXiv 2106.09685): several in one batch, over one copy of the model.

Read from PEFT's format by a loader of our own: what serving needs of it is a dozen settings and pairs of
matrices, and a setting that is not understood is refused instead of ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from engine_worker.attention.interface import Segment
from engine_worker.engine.errors import UnsupportedModel

_PREFIX: Final = "base_model.model."
_WANTED: Final[dict[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "use_qalora": (False, None),
    "trainable_token_indices": (None, []),
}
"""Settings that change the arithmetic, and the values with which it is x W^T + scale (x A^T) B^T."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one layer. `down`: float32[r, in]; `up`: float32[out, r], scale included."""

    down: Tensor
    up: Tensor


def load_adapter(directory: Path) -> dict[str, LowRank]:
    """By the name of the layer in the model. Raises UnsupportedModel, naming what is missing or not served."""
    try:
        settings: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"{directory} is not a PEFT adapter: no readable adapter_config.json"
        ) from error
    for name, good in _WANTED.items():
        if settings.get(name) not in good and name in settings:
            raise UnsupportedModel(f"adapter {directory}: {name}={settings[name]!r} is not served")
    weights = load_file(_weights_file(directory))
    layers: dict[str, LowRank] = {}
    for key in sorted(weights):
        name, kind = _layer(key, directory)
        if kind == "A":
            down, up = weights[key].float(), weights[key.replace("lora_A", "lora_B")].float()
            layers[name] = LowRank(down, up * _scale(settings, name, len(down)))
    return layers


def adapted_layers(directory: Path) -> set[str]:
    """The names of the layers that an adapter changes, without its weights. Raises as `load_adapter`."""
    with safe_open(_weights_file(directory), "pt") as weights:
        return {_layer(key, directory)[0] for key in weights.keys()}  # noqa: SIM118  # no mapping


def _weights_file(directory: Path) -> Path:
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        raise UnsupportedModel(f"adapter {directory} has no adapter_model.safetensors; pickles are not read")
    return file


def _layer(key: str, directory: Path) -> tuple[str, str]:
    """(name of the layer, "A" or "B") of a name in the file."""
    name, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
    if not key.startswith(_PREFIX) or kind not in ("A.weight", "B.weight"):
        raise UnsupportedModel(f"adapter {directory}: weights {key!r} are not served")
    return name, kind[0]


def _scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    alpha = settings["lora_alpha"]
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = own
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def load_adapters(model: nn.Module, directories: Mapping[str, Path]) -> dict[str, dict[str, LowRank]]:
    """By the adapter's name, by the layer's. Raises UnsupportedModel if one is not of this model."""
    loaded = {name: load_adapter(directory) for name, directory in directories.items()}
    for name, layers in loaded.items():
        for layer, low_rank in layers.items():
            try:
                base = model.get_submodule(layer)
            except AttributeError:
                base = None
            if not isinstance(base, nn.Linear):
                raise UnsupportedModel(f"adapter {name!r}: the model has no linear layer {layer!r}")
            shape = (low_rank.up.shape[0], low_rank.down.shape[1])
            if shape != (base.out_features, base.in_features):
                raise UnsupportedModel(f"adapter {name!r} is of another model: {layer} has other dimensions")
    return loaded


@dataclass(slots=True)
class _Rows:
    """Which rows of the step belong to which adapter; shared by all layers."""

    of: Mapping[str, Tensor] = field(default_factory=dict)


class Adapted(nn.Module):
    """A linear layer, and for the rows of each adapter what that adds."""

    def __init__(self, base: nn.Linear, added: Mapping[str, LowRank], rows: _Rows) -> None:
        super().__init__()
        self.base = base
        self._added = added
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Without any adapter's part: what is asked before there are rows."""
        out: Tensor = self.base(x)
        return out

    def add(self, x: Tensor, out: Tensor) -> None:
        """`x`: [tokens, in]; `out`: [tokens, out], to which it is added."""
        for name, rows in self._rows.of.items():
            if (added := self._added.get(name)) is not None:
                out.index_add_(0, rows, x.index_select(0, rows) @ added.down.T @ added.up.T)


class Adapters:
    """The adapters of one model, whose layers it wraps. Before they are packed."""

    def __init__(self, model: nn.Module, loaded: Mapping[str, Mapping[str, LowRank]]) -> None:
        """`loaded`: by name, see `load_adapters`."""
        self._rows = _Rows()
        for layer in sorted({layer for layers in loaded.values() for layer in layers}):
            added = {name: layers[layer] for name, layers in loaded.items() if layer in layers}
            parent_name, _, own_name = layer.rpartition(".")
            parent = model.get_submodule(parent_name)
            setattr(parent, own_name, Adapted(getattr(parent, own_name), added, self._rows))

    def select(self, segments: Sequence[Segment]) -> None:
        """For the next forward, whose packed row these segments are."""
        rows: dict[str, list[int]] = {}
        for segment in segments:
            if segment.adapter:
                own = range(segment.start, segment.start + segment.num_tokens)
                rows.setdefault(segment.adapter, []).extend(own)
        self._rows.of = {name: torch.tensor(indices) for name, indices in rows.items()}
