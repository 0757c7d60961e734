"""Settings: one reader, `_FILE` variants, and an end with the variable's name for whatever is malformed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from django.conf import settings

from engine_worker.arguments import WORKER_FLAGS
from engine_worker.config import EngineConfig
from engine_worker.worker_config import WorkerConfig
from weir.environment import BadEnvironment, Environment, generated_secret

ROOT = Path(__file__).resolve().parent.parent.parent


def manage(*arguments: str, var_dir: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEIR_", "DATABASE_", "REDIS_"))
    }
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=kept | {"WEIR_VAR_DIR": str(var_dir)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://somewhere/weir"),
        ("DATABASE_URL", "nonsense"),
        ("REDIS_URL", "http://localhost"),
        ("WEIR_PORT", "eighty"),
        ("WEIR_PORT", "99999"),
        ("WEIR_DEBUG", "perhaps"),
        ("WEIR_LOG_FORMAT", "xml"),
        ("WEIR_BASE_URL", "weir.example.com"),
        ("WEIR_SECRET_KEY_FILE", "/no/such/file"),
    ],
)
def test_a_malformed_variable_ends_the_start_with_its_name(tmp_path: Path, name: str, value: str):
    done = manage("up", var_dir=tmp_path, **{name: value})
    assert done.returncode != 0
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_a_password_in_a_malformed_url_is_not_repeated(tmp_path: Path):
    done = manage("check", var_dir=tmp_path, DATABASE_URL="mysql://weir:hunter2@db/weir")
    assert done.returncode != 0
    assert "hunter2" not in done.stderr + done.stdout


def test_without_a_url_and_without_servers_the_message_says_what_to_start(tmp_path: Path):
    done = manage("migrate", var_dir=tmp_path)
    assert done.returncode != 0
    assert "DATABASE_URL is not set and the embedded servers are not running" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_setting_is_in_the_example_file():
    listed = re.findall(r"^#?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == settings_of_gateways() | set(settings_of_workers())


def settings_of_gateways() -> set[str]:
    from weir.settings import env

    return env.names


def settings_of_workers() -> dict[str, object]:
    """Each with its default."""
    found = {field.name: field.default for field in fields(EngineConfig) if field.name != "model_dir"}
    found |= {field.name: field.default for field in fields(WorkerConfig) if field.name in WORKER_FLAGS}
    return {f"WEIR_{name.upper()}": default for name, default in found.items()}


def test_the_example_file_shows_the_workers_defaults():
    text = (ROOT / ".env.example").read_text()
    for name, default in settings_of_workers().items():
        shown = re.search(rf"^#{name}=(.*)$", text, re.MULTILINE)
        assert shown, name
        if default is None or default is MISSING:
            assert shown[1] == "", name
        elif isinstance(default, float):
            assert float(shown[1]) == default, name
        else:
            assert shown[1] == (str(default).lower() if isinstance(default, bool) else str(default)), name


def test_documents_and_deployments_name_only_settings_that_are_read():
    """A setting that was renamed goes on being set in vain."""
    files = [ROOT / "README.md", ROOT / "docker-compose.yml", *(ROOT / "docs").rglob("*.md")]
    files += [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    known = settings_of_gateways() | set(settings_of_workers())
    # A client's own, a test's, and two that compose reads itself.
    known |= {"WEIR_API_KEY", "WEIR_FUZZ_EXAMPLES", "WEIR_GPU_MODEL_DIR", "WEIR_GPU_MODEL_NAME"}
    named = {
        name: path.name for path in files for name in re.findall(r"\bWEIR_[A-Z0-9_]+\b", path.read_text())
    }
    assert len(named) > 30
    assert {name: path for name, path in named.items() if name not in known} == {}


def test_a_secret_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    monkeypatch.setenv("THING_FILE", str(file))
    assert Environment().secret("THING") == "s3cret"
    file.write_text("\n")
    with pytest.raises(BadEnvironment, match=r"THING_FILE .* empty"):
        Environment().secret("THING")
    monkeypatch.setenv("THING", "other")
    with pytest.raises(BadEnvironment, match="THING and THING_FILE are both set"):
        Environment().secret("THING")


def test_a_generated_secret_is_private_and_stays(tmp_path: Path):
    path = tmp_path / "secrets" / "key"
    first = generated_secret(path, "WEIR_SECRET_KEY")
    assert len(first) >= 50
    assert generated_secret(path, "WEIR_SECRET_KEY") == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    path.write_text("")
    with pytest.raises(BadEnvironment, match="WEIR_SECRET_KEY"):
        generated_secret(path, "WEIR_SECRET_KEY")


def test_the_secrets_of_this_run_are_generated_ones():
    assert settings.SECRET_KEY != settings.API_KEY_PEPPER
    assert (settings.VAR_DIR / "secrets" / "secret_key").read_text() == settings.SECRET_KEY
