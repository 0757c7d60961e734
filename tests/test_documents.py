"""What documents point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FOLDERS = "tests|benchmarks|deploy|platform|inference|tenants|engine_worker|templates"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_a_document_exist(document: Path):
    text = document.read_text()
    named = set(re.findall(rf"`((?:{_FOLDERS})/[\w./-]+)`", text))
    links = {link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)} - {""}
    # A table of tests may leave out the folder that all of them are in.
    missing = {name for name in named if not ((ROOT / name).exists() or (ROOT / "tests" / name).exists())}
    missing |= {link for link in links if not (document.parent / link).exists()}
    assert missing == set()
