"""Unmodified clients of other makers against the running product: a base URL and a key is all they are told.

What each does is in its script, which runs where that client is installed. The table in docs/api.md lists them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.site import ROOT

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(path.name for path in HERE.glob("client_*"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.endswith(".py")])
def test_a_python_client(runs_against, python_with_clients, script):
    assert runs_against(python_with_clients, script, tools=True).endswith("ok\n")


@pytest.mark.timeout(900)
def test_the_npm_package(runs_against, node_packages):
    assert runs_against("node", "client_node.mjs", tools=True, NODE_PACKAGES=str(node_packages))


def test_the_documents_name_each_of_them():
    table = (ROOT / "docs" / "api.md").read_text().partition("## Clients that are tested")[2]
    for name in ("LangChain", "LiteLLM", "Agents SDK", "`llm`", "npm"):
        assert name in table
    assert len(SCRIPTS) == 5
