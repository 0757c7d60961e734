"""Rendering and tokenising at the gateway equals transformers', and no message can speak as another."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from benchmarks import workload_path
from engine_worker.model_card import read_model_card
from inference.errors import InvalidRequest
from inference.prompts import Message, PromptRenderer
from tests.engine_worker.models import smollm2_dir
