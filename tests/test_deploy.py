"""Kubernetes manifests, systemd units and the secrets of compose, as far as they can be proved without a cluster."""

from __future__ import annotations

import copy
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine_worker.arguments import parse
from engine_worker.worker_config import WorkerConfig
from tests.weir.test_metrics import exported
from weir.settings import CELERY_TASK_TIME_LIMIT, env

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.34"
KUBECTL = shutil.which("kubectl") or shutil.which("kustomize")
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
needs_kustomize = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl or kustomize")


def manifests() -> list[dict[str, Any]]:
    files = [path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if "kustom" not in path.name]
    found = [part for path in sorted(files) for part in yaml.safe_load_all(path.read_text())]
    return [part for part in found if "apiVersion" in part]


RAW = manifests()


def built(folder: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    assert KUBECTL
    build = ["kustomize"] if KUBECTL.endswith("kubectl") else ["build"]
    done = subprocess.run(
        [KUBECTL, *build, str(DEPLOY / "kubernetes" / folder)], capture_output=True, check=True, timeout=60
    )
    return {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(done.stdout)}


def pods(parts: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (part["metadata"]["name"], part["spec"]["template"]["spec"])
        for part in parts
        if part["kind"] in ("Deployment", "Job")
    ]


@pytest.mark.parametrize("manifest", RAW, ids=lambda part: f"{part['kind']}-{part['metadata']['name']}")
def test_a_manifest_follows_the_schema_of_kubernetes(manifest: dict[str, Any]):
    if manifest["kind"] == "ScaledObject":  # KEDA's own resource: its schema is not Kubernetes's
        assert manifest["apiVersion"] == "keda.sh/v1alpha1"
        assert {"scaleTargetRef", "triggers"} <= set(manifest["spec"])
        return
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_schema_would_notice():
    broken = copy.deepcopy(next(part for part in RAW if part["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@needs_kustomize
@pytest.mark.parametrize("folder", ["", "gpu"])
def test_what_kustomize_builds_fits_together(folder: str):
    parts = built(folder)
    for (kind, _), part in parts.items():
        if kind != "ScaledObject":
            kubernetes_validate.validate(part, KUBERNETES, strict=True)
        else:
            assert ("Deployment", part["spec"]["scaleTargetRef"]["name"]) in parts
            (trigger,) = part["spec"]["triggers"]
            query = trigger["metadata"]["query"]
            assert set(re.findall(r"\bweir_\w+", query)) <= exported()
            (_, target) = next(
                pod for pod in pods([parts["Deployment", part["spec"]["scaleTargetRef"]["name"]]])
            )
            model = re.search(r'model="([^"]+)"', query)
            assert model
            assert any(word.startswith(f"{model[1]}=") for word in target["containers"][0]["command"])
        if kind == "HorizontalPodAutoscaler":
            assert ("Deployment", part["spec"]["scaleTargetRef"]["name"]) in parts
        if kind == "Deployment":
            labels = part["spec"]["template"]["metadata"]["labels"]
            assert part["spec"]["selector"]["matchLabels"].items() <= labels.items()
            name = part["metadata"]["name"]
            if name != "weir-beat":
                budget = parts["PodDisruptionBudget", name]["spec"]
                assert budget["selector"]["matchLabels"].items() <= labels.items()
            if ("HorizontalPodAutoscaler", name) in parts or ("ScaledObject", name) in parts:
                assert "replicas" not in part["spec"], "who scales it must not be overruled by each apply"
    images = {
        container["image"]
        for _, pod in pods(list(parts.values()))
        for container in pod["containers"] + pod.get("initContainers", [])
    }
    assert images == {"registry.example.com/weir:0.1.0"}


def test_every_pod_is_confined():
    for name, pod in pods(RAW):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"] + pod.get("initContainers", []):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert not security["allowPrivilegeEscalation"], name
            assert "memory" in container["resources"]["limits"], name


def test_settings_are_ones_that_are_read_and_secrets_are_files():
    (config,) = (part["data"] for part in RAW if part["kind"] == "ConfigMap")
    assert set(config) <= env.names
    mounted = {Path(value).name for name, value in config.items() if name.endswith("_FILE")}
    assert mounted == {name.removesuffix("_FILE") for name in config if name.endswith("_FILE")}
    documented = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    assert all(f"--from-file={name}" in documented for name in mounted)
    engine = dict(pods(RAW))["weir-engine"]
    variables = {entry["name"]: entry.get("value", "x") for entry in engine["containers"][0]["env"]}
    assert not {"DATABASE_URL_FILE", "WEIR_API_KEY_PEPPER_FILE", "WEIR_SECRET_KEY_FILE"} & set(variables)
    variables.pop("REDIS_URL_FILE")
    command = engine["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "engine_worker"]
    parsed = parse(command[3:], variables | {"REDIS_URL": "redis://x"})
    assert parsed.worker.metrics_port == 9102
    assert parsed.worker.drain_grace_s + 20 < engine["terminationGracePeriodSeconds"]


def test_a_pod_is_not_killed_before_it_has_drained():
    by_name = dict(pods(RAW))
    gateway = by_name["weir-gateway"]
    stop = gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[:3] == ["python", "manage.py", "drain"]
    assert int(stop[stop.index("--timeout") + 1]) + 20 <= gateway["terminationGracePeriodSeconds"]
    assert by_name["weir-celery"]["terminationGracePeriodSeconds"] > CELERY_TASK_TIME_LIMIT
    for path in (DEPLOY / "systemd").glob("*.service"):
        text = path.read_text()
        stop_s = int(found[1]) if (found := re.search(r"^TimeoutStopSec=(\d+)", text, re.M)) else 90
        if "engine_worker" in text:
            assert stop_s > WorkerConfig("m", "redis://x").drain_grace_s + 20
        if "celery -q -A weir.celery worker" in text:
            assert stop_s > CELERY_TASK_TIME_LIMIT
        if drained := re.search(r"drain .*--timeout (\d+)", text):
            assert stop_s >= int(drained[1]) + 20


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path):
    assert SYSTEMD_ANALYZE
    names = []
    for path in (DEPLOY / "systemd").iterdir():
        # The user and the virtual environment of an installation are not on this machine.
        text = path.read_text().replace("/opt/weir/.venv/bin/python", sys.executable)
        (tmp_path / path.name).write_text(re.sub(r"(?m)^(User|Group)=weir$", r"\1=root", text))
        names.append(path.name.replace("@.", "@8000."))
        # Every setting of ours is one that something reads.
        read = env.names | {"PYTHONPATH", "DJANGO_SETTINGS_MODULE", "PYTHONUNBUFFERED"}
        set_here = re.findall(
            r"(?:^Environment=|\s)([A-Z_]+)=", "\n".join(re.findall(r"(?m)^Environment=.*", text))
        )
        assert set(set_here) <= read
    assert len(names) == 6
    environ = {"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"}

    def verify(*units: str) -> str:
        done = subprocess.run(
            [SYSTEMD_ANALYZE, "verify", "--man=no", *(str(tmp_path / unit) for unit in units)],
            env=environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return "\n".join(
            line
            for line in (done.stdout + done.stderr).splitlines()
            if str(tmp_path) in line or "weir" in line
        )

    assert verify(*names) == ""
    (tmp_path / "weir-beat.service").write_text("[Service]\nExecStart=/no/such/program\nRestarts=always\n")
    assert "Restarts" in verify("weir-beat.service"), "it would notice"


def test_compose_finds_the_secrets_that_the_script_makes(tmp_path: Path):
    (tmp_path / "deploy").mkdir()
    shutil.copy(DEPLOY / "make-secrets", tmp_path / "deploy")

    def make() -> dict[str, str]:
        subprocess.run([tmp_path / "deploy" / "make-secrets"], check=True, capture_output=True, timeout=30)
        return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}

    made = make()
    assert made == make(), "what is there stays"
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert {Path(secret["file"]).name for secret in compose["secrets"].values()} == set(made)
    assert made["postgres_password"] in made["database_url"]
    assert made["redis_password"] in made["redis_url"]
    random = ["postgres_password", "redis_password", "secret_key", "api_key_pepper", "metrics_token"]
    assert len({made[name] for name in random}) == len(random)
    assert all(len(made[name]) == 64 for name in random)
    for name, service in compose["services"].items():
        wanted = {
            Path(value).name for key, value in service.get("environment", {}).items() if key.endswith("_FILE")
        }
        assert wanted <= set(service.get("secrets", [])), name
        assert not any(
            "PASSWORD" in key and not key.endswith("_FILE") for key in service.get("environment", {})
        )
    assert "secrets" in (ROOT / ".dockerignore").read_text().split()
