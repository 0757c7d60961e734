"""docker-compose.yml and the image, as far as they can be proved without a Docker engine."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine_worker.arguments import parse
from weir.settings import env

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "weir:local"}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")


def test_it_follows_the_compose_specification():
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(COMPOSE)


def test_the_schema_would_notice():
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    broken = {**COMPOSE, "services": {"gateway": {"imagee": "x"}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validators.validator_for(schema)(schema).validate(broken)


def test_all_parts_of_the_product_are_there():
    assert set(COMPOSE["services"]) >= {
        "postgres", "valkey", "migrate", "gateway", "celery", "beat", "engine", "engine-gpu"
    }  # fmt: skip
    profiles = {name: service["profiles"] for name, service in OURS.items() if "profiles" in service}
    assert profiles == {"model": ["cpu"], "engine": ["cpu"], "engine-gpu": ["gpu"]}


def test_services_depend_on_services_that_can_satisfy_them():
    for name, service in COMPOSE["services"].items():
        for needed, condition in service.get("depends_on", {}).items():
            target = COMPOSE["services"][needed]
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in target, f"{name} waits for {needed}, which has no health check"
            else:
                assert target.get("restart") == "no", f"{name} waits for the end of {needed}, which restarts"


@pytest.mark.parametrize("name", OURS)
def test_what_a_service_runs_exists(name: str):
    program, *arguments = OURS[name]["command"]
    assert program == "python"
    if arguments[0] == "-m":
        assert find_spec(arguments[1]), f"no module {arguments[1]}"
    else:
        assert (ROOT / arguments[0]).is_file()
    for argument in arguments:
        if re.fullmatch(r"weir\.\w+:\w+", argument):
            module, _, attribute = argument.partition(":")
            assert hasattr(import_module(module), attribute)
    if arguments[:2] == ["-m", "engine_worker"]:
        # The file is in the container.
        environment = {**OURS[name]["environment"], "REDIS_URL_FILE": "", "REDIS_URL": "redis://valkey"}
        assert parse(arguments[2:], environment).worker.model


@pytest.mark.parametrize("name", OURS)
def test_a_service_sets_only_variables_that_are_read(name: str):
    assert set(OURS[name].get("environment", {})) <= env.names


def test_services_share_the_paths_that_they_must_share():
    _, _, _, *made = OURS["model"]["command"]
    link = made[made.index("--link") + 1]
    engine = OURS["engine"]["command"]
    assert engine[engine.index("--model") + 1].partition("=")[2] == link
    mounts = {volume.split(":")[1] for volume in OURS["engine"]["volumes"] + OURS["model"]["volumes"]}
    assert mounts == {str(Path(link).parent)}
    assert f"/app/var/{Path(link).parent.name}" in DOCKERFILE, "a volume takes its owner from the image"


def test_named_volumes_are_declared():
    used = {
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", [])
        if re.match(r"\w+:", volume)
    }
    assert used == set(COMPOSE["volumes"])


def test_the_image_copies_what_exists_and_all_that_is_needed():
    copied: set[str] = set()
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY "):
            *sources, _target = shlex.split(line)[1:]
            copied |= set(sources)
    assert all((ROOT / source).exists() for source in copied)
    assert copied >= {"manage.py", "platform", "tenants", "inference", "engine_worker", "templates"}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
