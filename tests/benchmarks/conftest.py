"""Without a GPU the Triton kernels run in its interpreter, which is chosen when they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
