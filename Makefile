# `make train` and `make test` do all of their own set-up; they need Python 3.11 or newer and nothing else.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS ?= .venv-clients
PIP := $(BIN)/pip install --quiet --no-compile -c constraints.txt

# Hundreds of processes import torch: with its bytecode kept that takes each of them half the time.
unexport PYTHONDONTWRITEBYTECODE

# A third one makes nothing faster: two keep two cores busy for 98 % of the time.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-all test-rest mutants lint parity upstream models stages versions gpu pages cluster clients docs clean

train: $(VENV)/.installed
	$(BIN)/launch --config ds_configs/zero2.json

# Every room, every promise of the README, every kind of fault.
test: $(VENV)/.installed-test
	$(PYTEST) --durations 20

# Everything. The machines of `cluster` can only be made by root; its tests wait more than they compute, so others run
# beside them. What each target prints comes when it has ended.
AS_ROOT := $(if $(filter 0,$(shell id -u)),cluster)
test-all: test test-rest
	@test -n "$(AS_ROOT)" || echo "not root: make cluster is left out"
	$(MAKE) $(VENV)/.installed-parity
	$(MAKE) --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) $(AS_ROOT) parity models stages

# The cases of the full products that `make test` leaves out.
test-rest: $(VENV)/.installed-test
	$(PYTEST) --rest --durations 20

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

# Sixty faults, one after the other: which do the tests find? Takes half an hour.
mutants: $(VENV)/.installed-test
	$(BIN)/python -m tests.mutants

# Against the real DeepSpeed and Megatron-Core: needs a C++ compiler.
parity: $(VENV)/.installed-parity
	$(BIN)/python -m tests.parity_deepspeed.operators
	LAUNCHER_TEST_PARITY=1 $(PYTEST) tests/parity_deepspeed tests/parity_megatron \
	  tests/engine/test_qlora_recipe.py tests/engine/test_float8.py --full --timeout 1000 --durations 20

# DeepSpeed's own unit tests on both engines, from a checkout: make upstream DEEPSPEED=DIR. Hours on two cores.
upstream: $(VENV)/.installed-parity
	@test -f "$(DEEPSPEED)/tests/unit/common.py" || (echo "name a checkout of DeepSpeed: make upstream DEEPSPEED=DIR"; exit 1)
	$(BIN)/python -m tests.parity_deepspeed.operators
	$(BIN)/python -m tests.parity_deepspeed.upstream --tests $(DEEPSPEED)/tests/unit --results $(VENV)/upstream

# Every causal-LM type under tensor parallelism and in stages; fails where docs/models.md says otherwise.
models: $(VENV)/.installed-test
	$(BIN)/python -m tests.tensor.models_table
	$(BIN)/python -m tests.sequence.zoo
	$(BIN)/python -m tests.experts.zoo

# Every pipeline schedule beside one process; fails where they differ.
stages: $(VENV)/.installed-test
	$(BIN)/python -m tests.pipeline.parity_table

# The core of the tests on older and newer versions of transformers; ONLY="NAME==VERSION ..." tries others, torch's too.
versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions $(ONLY)

# On a machine with a GPU: tests there, the estimate beside its memory, speed beside others. docs/gpu.md says more.
gpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu --seconds 1800 --speed-seconds 600

# Writes docs/models.md and docs/stages.md.
pages: $(VENV)/.installed-test
	$(BIN)/python -m tests.tensor.models_table --write
	$(BIN)/python -m tests.pipeline.parity_table --write

# Every runner that is installed, every fault, and training, on pretend machines: needs root and the programs below.
# apt-get install --no-install-recommends iproute2 openssh-client openssh-server procps pdsh slurm-wlm openmpi-bin mpich
cluster: $(VENV)/.installed-test
	LAUNCHER_TEST_CLUSTER=1 HOSTS_REQUIRED=1 $(BIN)/python -m pytest tests/cluster --full

# Programs of others, on ours and on DeepSpeed; writes the table of docs/transformers.md. Those of public repositories run
# where EXAMPLES=DIR has checkouts of them; ONLY=TEXT runs some. Needs a network and a C++ compiler.
clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m tests.parity_deepspeed.operators
	$(CLIENTS)/bin/python -m tests.clients $(if $(EXAMPLES),--examples $(EXAMPLES)) $(if $(ONLY),--only "$(ONLY)")

# The site of docs/, in site/. Pages that are made from the code are written first; a broken link is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m tests.pages
	$(BIN)/zensical build --clean --strict

clean:
	rm -rf site .cache $(VENV) $(CLIENTS) .venv-versions

# torch first: packages that look for it while they are built must find this one.
$(VENV)/.torch: constraints.txt
	@test -n "$(PYTHON)" || (echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python"; exit 1)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) -e ".[test,dev]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e ".[docs]"
	touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-test
	$(PIP) setuptools wheel ninja hatchling editables
	$(PIP) --no-build-isolation -e ".[test,parity]"
	touch $@

$(CLIENTS)/.installed: constraints.txt pyproject.toml tests/clients/requirements.txt tests/clients/older.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --no-compile -c constraints.txt torch setuptools wheel ninja hatchling editables
	$(CLIENTS)/bin/pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e ".[test,parity]" \
		-r tests/clients/requirements.txt
	$(CLIENTS)/bin/pip install --quiet --no-compile --no-deps --upgrade --target $(CLIENTS)/older -r tests/clients/older.txt
	touch $@
