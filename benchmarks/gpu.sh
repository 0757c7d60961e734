#!/usr/bin/env bash
# Every test and benchmark of the GPU path, in under 8 minutes, with a table last.
# Needs Python with torch, transformers, triton and pytest: no server, no download, weights are random.
# Without a GPU it says so and is done. PYTHON names the interpreter; arguments go to `benchmarks.gpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA device"
  exit 0
fi
"$python" -c 'import torch, triton, transformers; print("torch", torch.__version__, "triton", triton.__version__, "transformers", transformers.__version__, torch.cuda.get_device_name())'

# Most of the tests' time is the compiling of kernels, on one core each: so three at once. The
# project's own pytest settings start servers, which no GPU test needs.
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
gpu_tests() {
  timeout 150 "$python" -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider \
    "$@"
}
kernels="tests/engine_worker/attention/test_triton_kernels.py tests/engine_worker/attention/test_cuda.py"
# shellcheck disable=SC2086 # two files
gpu_tests $kernels -k decode >"$logs/decode" 2>&1 & decode=$!
# shellcheck disable=SC2086
gpu_tests $kernels -k "not decode" >"$logs/rest" 2>&1 & rest=$!
gpu_tests tests/engine_worker/runner/test_gpu_steps.py >"$logs/steps" 2>&1 & steps=$!
status=0
wait "$decode" || status=1
wait "$rest" || status=1
wait "$steps" || status=1
tail -n 25 "$logs/decode" "$logs/rest" "$logs/steps"
[ "$status" = 0 ] && tests=passed || tests=FAILED

"$python" -m benchmarks.gpu --budget-s 240 --limit-s 300 --tests "$tests" "$@" || status=1
exit "$status"
