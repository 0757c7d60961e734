"""Compiles the kernels for this machine, where they can run and are not compiled yet: about a minute.

    python -m engine_worker.compiled

The first worker on a machine does it by itself; others that start meanwhile wait for it.
"""

from __future__ import annotations

import importlib.util
import time


def main() -> None:
    if importlib.util.find_spec("numba") is None:
        print("numba is not installed: torch's kernels run instead.")
        return
    # Here and not above: numba is optional.
    from engine_worker.compiled import team
    from engine_worker.compiled.vector import WIDTH

    if WIDTH == 0 or not team.AVAILABLE:
        print(
            "This machine has no vector unit or no OpenMP runtime that the kernels know: torch's run instead."
        )
        return
    began = time.perf_counter()
    # It compiles when it is imported, which only a machine that can run it survives.
    from engine_worker.compiled.once import compiling

    with compiling():
        from engine_worker.compiled import forward

    assert forward.run_step.address
    print(f"The kernels are compiled for this machine ({time.perf_counter() - began:.0f} s).")


if __name__ == "__main__":
    main()
