"""The examples of docs/api.md, as they stand there but for the model's name."""

from __future__ import annotations

import re
import sys

import pytest

from tests.e2e.site import ROOT

SECTION = (ROOT / "docs" / "api.md").read_text().partition("## Examples")[2].partition("\n## ")[0]
EXAMPLES = dict(re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL))


def test_there_is_one_for_each():
    assert set(EXAMPLES) == {"sh", "python", "js"}


@pytest.mark.parametrize("language", ["sh", "python"])
def test_it_runs(runs_against, site, key, model, language):
    text = EXAMPLES[language].replace("smollm2-135m-instruct", model)
    command = ("sh", "-c", text) if language == "sh" else (sys.executable, "-c", text)
    assert runs_against(*command, WEIR_BASE_URL=site.url, WEIR_API_KEY=key)


def test_it_runs_under_node(runs_against, node_packages, site, key, model):
    (node_packages / "example.mjs").write_text(EXAMPLES["js"].replace("smollm2-135m-instruct", model))
    assert runs_against("node", str(node_packages / "example.mjs"), WEIR_BASE_URL=site.url, WEIR_API_KEY=key)
