"""The forward pass on the CPU, compiled by numba for the processor it runs on.

`tile.py` and, for bytes, `dot.py` are the arithmetic: register tiles of a matrix product, written as LLVM
instructions (`vector.py`), as are functions of whole rows (`pointwise.py`). `product.py` makes linear layers
of tiles, `attention.py` attention over KV blocks, and `forward.py` the whole pass, which a team of threads
(`team.py`) runs in one call per step. `decoder.py` is what the runner sees.

Optional: where numba, a vector unit or an OpenMP runtime is missing, or a model has parts that
`decoder.py` does not know, `transformers`' modules run on torch's kernels instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

if importlib.util.find_spec("numba") is not None:
    import numba

    def _cache_dir() -> str:
        """A place for machine code that a change of any of these files, or of numba, empties.

        numba itself looks only at the file of the function it compiles, not at what that calls.
        """
        sources = hashlib.sha256(numba.__version__.encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            sources.update(path.read_bytes())
        home = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
        wanted = Path(home) / "weir" / "compiled" / sources.hexdigest()[:16]
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError:
            return tempfile.mkdtemp(prefix="weir-compiled-")
        return str(wanted)

    if not os.environ.get("NUMBA_CACHE_DIR"):
        numba.config.CACHE_DIR = _cache_dir()
