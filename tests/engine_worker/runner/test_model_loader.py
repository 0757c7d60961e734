"""What a directory says of the tokens that end an answer."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from engine_worker.runner.model_loader import read_vocabulary
from tests.engine_worker.models import EOS, make_tiny_model


@pytest.mark.parametrize("eos_token", ["<eos2>", {"content": "<eos2>", "special": True}])
@pytest.mark.parametrize(
    ("generation", "tokenizers_own", "expected"),
    [
        (None, False, {EOS}),
        ({"eos_token_id": [EOS, 7]}, False, {EOS, 7}),
        ({"eos_token_id": 7}, False, {EOS, 7}),
        # As fine-tuned models have it: the base's end in the configurations, that of a turn in the tokenizer's alone.
        ({"eos_token_id": EOS}, True, {EOS, EOS + 1}),
        (None, True, {EOS, EOS + 1}),
    ],
)
def test_an_answer_ends_at_every_token_that_some_file_names(
    tmp_path, generation, tokenizers_own, eos_token, expected
):
    directory = make_tiny_model(tmp_path)
    files = {
        "generation_config.json": generation,
        "tokenizer_config.json": {"eos_token": eos_token} if tokenizers_own else None,
    }
    for name, content in files.items():
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    found = read_vocabulary(directory, AutoConfig.from_pretrained(directory))
    assert found.eos_token_ids == expected
