"""The list of dependencies that auditors get is the lock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_bill_of_materials_names_every_pin(tmp_path: Path):
    out = tmp_path / "sbom.json"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--pyproject", "pyproject.toml",
         "--output-reproducible", "--output-file", out, "requirements.lock"],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    listed = {(part["name"], part["version"]) for part in json.loads(out.read_text())["components"]}
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split(";")[0].strip().split("==") for line in lines if "==" in line and line[0].isalnum()]
    assert len(pins) > 100
    assert listed == {(name, version) for name, version in pins}
