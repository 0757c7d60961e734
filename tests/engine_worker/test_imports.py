"""Who must be able to live without whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

BLOCKER = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is out of bounds")
sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
"""

SHARED = ["engine_worker.protocol", "engine_worker.broker"]
WORKER = [
    "engine_worker.worker",
    "engine_worker.worker_config",
    "engine_worker.outbox",
    "engine_worker.process",
    "engine_worker.model_card",
]
HEAVY = {"torch", "transformers", "tokenizers", "numpy"}
PRODUCT = {"django", "celery", "channels", "tenants", "inference", "weir"}


@pytest.mark.parametrize(
    ("modules", "blocked"), [(SHARED, HEAVY | PRODUCT), (WORKER, HEAVY | PRODUCT)], ids=["shared", "worker"]
)
def test_imports_with_the_others_out_of_bounds(modules, blocked):
    code = BLOCKER.format(blocked=blocked, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks():
    code = BLOCKER.format(blocked={"msgspec"}, modules=SHARED)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "msgspec is out of bounds" in done.stderr
