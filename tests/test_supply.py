"""The list of dependencies that auditors get is the lock."""

from __future__ import annotations

import json
import re
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


def test_what_an_auditor_is_told_to_look_at_first_is_pinned():
    told = (
        (ROOT / "docs" / "security.md").read_text().partition("What to look at first")[2].partition("\n\n")[0]
    )
    names = set(re.findall(r"`([a-z0-9-]+)`", told))
    assert len(names) > 10
    pins = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert names <= pins
