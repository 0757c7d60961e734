"""The list of dependencies that auditors get is the lock."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
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


def test_the_auditors_list_names_every_package_that_runs_and_no_other():
    section = (
        (ROOT / "docs" / "security.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    listed = [name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[2])]
    assert len(listed) == len(set(listed))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in asked}
    assert len(direct) > 30
    assert direct <= set(listed)
    pins = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert set(listed) <= pins
