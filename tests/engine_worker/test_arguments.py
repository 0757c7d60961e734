from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine_worker.arguments import parse
from engine_worker.config import EngineConfig

REDIS = {"REDIS_URL": "redis://secret@host"}


def test_the_least_that_must_be_said():
    arguments = parse(["--model", "chat=/models/x"], REDIS)
    assert (arguments.worker.model, arguments.model_spec) == ("chat", "/models/x")
    assert arguments.worker.redis_url == "redis://secret@host"
    assert "secret" not in repr(arguments)
    assert arguments.engine == {}
    EngineConfig(model_dir=Path("x"), **arguments.engine)


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("smollm2-135m-instruct", None, ("smollm2-135m-instruct", "smollm2-135m-instruct")),
        ("/models/qwen3", None, ("qwen3", "/models/qwen3")),
        ("a=/models/qwen3", None, ("a", "/models/qwen3")),
        ("/models/qwen3", "b", ("b", "/models/qwen3")),
        ("a=/models/qwen3", "b", ("a", "/models/qwen3")),
    ],
)
def test_a_model_is_named(model, name, expected):
    environ = REDIS | {"WEIR_MODEL": model} | ({"WEIR_MODEL_NAME": name} if name else {})
    arguments = parse([], environ)
    assert (arguments.worker.model, arguments.model_spec) == expected


def test_flags_win_over_the_environment():
    environ = REDIS | {
        "WEIR_MODEL": "a=b",
        "WEIR_MAX_NUM_SEQS": "3",
        "WEIR_PRECISION": "int8",
        "WEIR_DRAIN_GRACE_S": "7",
    }
    arguments = parse(["--max-num-seqs", "5", "--lease-ms", "99"], environ)
    assert arguments.engine == {"max_num_seqs": 5, "precision": "int8"}
    assert (arguments.worker.lease_ms, arguments.worker.drain_grace_s) == (99, 7.0)


@pytest.mark.parametrize(("text", "value"), [("false", False), ("0", False), ("True", True), ("1", True)])
def test_switches(text, value):
    assert parse(["--model", "a=b", "--prefix-cache", text], REDIS).engine == {"prefix_cache": value}


def test_the_redis_url_may_lie_in_a_file(tmp_path):
    (tmp_path / "url").write_text("redis://from-a-file\n")
    arguments = parse(["--model", "a=b"], {"REDIS_URL_FILE": str(tmp_path / "url")})
    assert arguments.worker.redis_url == "redis://from-a-file"


def test_help_says_what_each_setting_is_and_its_default(capsys):
    with pytest.raises(SystemExit) as exited:
        parse(["--help"], {})
    assert exited.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "--block-size BLOCK_SIZE Tokens per KV block" in told
    assert "Sequences that run at once. Default: 64. (WEIR_MAX_NUM_SEQS)" in told
    for flag in fields(EngineConfig):
        assert flag.name == "model_dir" or f"(WEIR_{flag.name.upper()})" in told


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], REDIS, "WEIR_MODEL"),
        (["--model", "a=b", "--prefix-cache", "maybe"], REDIS, "--prefix-cache"),
        (["--model", "a=b"], REDIS | {"WEIR_PREFIX_CACHE": "off?"}, "WEIR_PREFIX_CACHE"),
        (["--model", "a=b"], {}, "REDIS_URL"),
        (["--model", "a=b"], {"REDIS_URL_FILE": "/none"}, "REDIS_URL_FILE"),
        (["--model", "a=b"], REDIS | {"WEIR_MAX_NUM_SEQS": "many"}, "WEIR_MAX_NUM_SEQS"),
        (["--model", "a=b"], REDIS | {"WEIR_PRECISION": "fp12"}, "WEIR_PRECISION"),
        (["--model", "a=b", "--precision", "fp12"], REDIS, "--precision"),
        (["--model", "a=b", "--lease-ms", "x"], REDIS, "--lease-ms"),
    ],
)
def test_what_is_malformed_is_named_and_fatal(argv, environ, named, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(argv, environ)
    assert exited.value.code == 2
    assert named in capsys.readouterr().err
