# Each target sets up its own .venv from nothing but Python 3.11 and pip, and is quick once that is done.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run-ready
DEV := $(VENV)/.dev-ready
DOCS := $(VENV)/.docs-ready
BENCH := .venv-bench/.ready
STREAMING := .venv-bench-streaming/.ready
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test prove test-gpu lint docs data env-packages bench clean

demo: $(RUN)  ## train a ResNet on handwritten digits, on two processes
	$(BIN)/shardwise train examples/digits.py --nproc 2

# Tests fork thousands of ranks: with huge pages, a fork of a large process copies a fraction of its page table.
# The linters, which take one core for 15 s in a new clone, run beside the first tests.
test: $(DEV)  ## every gate and every quick test
	$(BIN)/python -m compileall -q src examples  # or, with PYTHONDONTWRITEBYTECODE, every process would: 0.4 s each
	$(MAKE) lint & linters=$$!; \
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m pytest -m "not gpu and not prove" --numprocesses auto --maxprocesses 4 --dist worksteal; \
	tests=$$?; wait $$linters && exit $$tests

prove: $(DEV) $(DOCS) env-packages  ## the long proofs, whole
	$(BIN)/python -m pytest -m prove --timeout 3600 --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-gpu: $(DEV)  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(DEV)  ## style, types and one-way imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(DOCS)  ## the documentation site, into site/; a broken link or a page that no section lists fails
	$(BIN)/python scripts/build_site.py

data:  ## real MNIST and Fashion-MNIST into data/
	$(PYTHON) scripts/fetch_data.py

env-packages:  ## system packages of tests/env (SLURM, ssh, MPI, namespaces, a browser) and of NVMe offload; without them those tests skip
	command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ] && apt-get install -qq -y --no-install-recommends \
		slurmctld slurmd slurm-client openmpi-bin openssh-server iproute2 iptables chromium libaio-dev g++ ninja-build > /dev/null || true

bench: $(BENCH) $(STREAMING)  ## side-by-side runs against peers, each in its own environment
	.venv-bench/bin/python benchmarks/overhead.py
	.venv-bench/bin/python benchmarks/recording.py
	.venv-bench/bin/python benchmarks/recorder.py
	.venv-bench/bin/python benchmarks/launch.py
	.venv-bench/bin/python benchmarks/comm.py
	.venv-bench/bin/python benchmarks/mpi.py
	.venv-bench/bin/python benchmarks/watching.py
	.venv-bench/bin/python benchmarks/low_communication.py
	.venv-bench/bin/python benchmarks/checkpoint.py
	.venv-bench/bin/python benchmarks/data.py
	.venv-bench-streaming/bin/python benchmarks/data_feed.py
	.venv-bench/bin/python benchmarks/data_wait.py
	.venv-bench/bin/python benchmarks/strategies_memory.py
	.venv-bench/bin/python benchmarks/board.py
	.venv-bench/bin/python benchmarks/float8.py
	.venv-bench/bin/python benchmarks/float8_loss.py
	.venv-bench/bin/python benchmarks/race.py
	.venv-bench/bin/python benchmarks/step.py
	.venv-bench/bin/python benchmarks/optimizers.py
	.venv-bench/bin/python benchmarks/deepspeed.py
	.venv-bench/bin/python benchmarks/plan_memory.py
	.venv-bench/bin/python benchmarks/plan_time.py
	.venv-bench/bin/python benchmarks/plan_published.py
	.venv-bench/bin/python benchmarks/plan_search.py

clean:  ## forget the environments
	rm -rf $(VENV) .venv-bench .venv-bench-streaming

$(RUN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --editable .
	touch $@

$(DEV): $(RUN)
	$(BIN)/pip install $(PIP_FLAGS) --editable ".[dev]"
	touch $@

$(DOCS): $(RUN)
	$(BIN)/pip install $(PIP_FLAGS) --editable ".[docs]"
	touch $@

$(BENCH): pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install $(PIP_FLAGS) --editable . --requirement benchmarks/peers.txt
	touch $@

$(STREAMING): pyproject.toml benchmarks/peers-streaming.txt
	$(PYTHON) -m venv .venv-bench-streaming
	.venv-bench-streaming/bin/pip install --quiet --disable-pip-version-check --editable . --requirement benchmarks/peers-streaming.txt
	touch $@
