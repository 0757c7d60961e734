"""The GPU path, measured: `benchmarks/gpu.sh`, or `python -m benchmarks.gpu` for this part alone.

    python -m benchmarks.gpu                                          # on a GPU
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --tiny   # that it runs at all

Random weights in real shapes, bfloat16. Medians; shares are of what the device itself was measured
to do in the same call. The table comes last.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from transformers import PretrainedConfig

from benchmarks.gpu import kernels, models
from benchmarks.gpu.report import Report
from benchmarks.gpu.stepper import random_model


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Measures the GPU path.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="shapes that an interpreter can do")
    parser.add_argument("--budget-s", type=float, default=300, help="no part is begun after so many seconds")
    parser.add_argument("--limit-s", type=float, default=360, help="whatever still runs then is ended")
    parser.add_argument("--tests", help="how the tests went, for the table")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device")
        return 0
    device = torch.device(options.device)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    report = Report(options.budget_s)
    with report.ended_after(options.limit_s):
        measure_all(report, device, dtype, options)
    print()
    print(report.table())
    return int(report.failed)


def measure_all(
    report: Report, device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> None:
    if options.tests:
        report.add("tests", "kernels and their choice", options.tests)
    roof = kernels.Roof.measure(device, dtype)
    report.add("copy", "1 GiB" if device.type == "cuda" else "4 MiB", f"{roof.bytes_per_s / 1e9:.0f} GB/s")
    report.add("product", str(dtype).removeprefix("torch."), f"{roof.flops / 1e12:.2f} TFLOP/s")
    for name, measure in (
        ("decode attention", kernels.decode),
        ("prefill attention", kernels.prefill),
        ("KV write", kernels.write),
    ):
        report.part(name, partial(measure, report, roof, device, dtype, tiny=options.tiny))
    for name, config in models.configs(tiny=options.tiny).items():
        report.part(
            name, partial(measure_model, report, roof, name, config, device, dtype, tiny=options.tiny)
        )


def measure_model(
    report: Report,
    roof: kernels.Roof,
    name: str,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tiny: bool,
) -> None:
    model = random_model(config, device, dtype)
    report.part(f"decode, {name}", partial(models.decode, report, roof, name, model, tiny=tiny))
    report.part(f"choice, {name}", partial(models.choice, report, name, model, tiny=tiny))
    report.part(f"first token, {name}", partial(models.first_token, report, name, model, tiny=tiny))
    if device.type == "cuda":
        report.part(
            f"generate, {name}", partial(models.against_transformers, report, name, model), required=False
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
