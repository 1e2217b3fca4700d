# The same few commands for people and for CI. Each makes the environment first, if it is not there.
#
#   make demo       two ranks on this machine, a real model, real data; predictions in demo-out/
#   make test       lint, types, tests
#   make bench      throughput, memory, links, scheduler, codec, each beside its target (minutes, on an idle machine)
#   make bench-training    every training schedule against one process (minutes, on an idle machine)
#   make bench-cluster     ViT-Base and BERT-Base on emulated clusters (as root; two hours)
#   make setup      the environment alone
#   make clean      removes what these commands made, the environment too
#
#   PYTHON=...      interpreter to make the environment with, 3.10 or newer
#   VENV=...        where the environment is; an existing one is completed
#   JOBS=...        processes that share the tests (2)
#   TORCH_INDEX=... package index to install torch from, e.g. one with CPU builds, or with a certain CUDA;
#                   name it once, with setup

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types native pytest bench bench-training bench-cluster clean
.DELETE_ON_ERROR:

bin := $(VENV)/bin
python := $(bin)/python
ready := $(VENV)/.pipeedge-ready
native_sources := $(wildcard src-native/CMakeLists.txt $(foreach part,core codec yaml cli bindings,src-native/$(part)/*.[ch]pp) src-native/codec/kernels.inc)
python_sources := pipeedge tests tools benchmarks $(wildcard *.py) scripts/pin-dependencies

help:
	@sed -n '/^#   /s/^#   //p' Makefile

# Set-up is repeated when something that it depends on changes; the stamp is the last thing it writes.
$(ready): pyproject.toml constraints.txt setup.py CMakeLists.txt scripts/setup $(native_sources)
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup "$(VENV)"
	@touch $@

# Another index for torch means another torch, whatever is there.
ifneq ($(TORCH_INDEX),)
.PHONY: other_torch
$(ready): other_torch
endif

setup: $(ready)

demo: $(ready)
	@$(python) tools/demo.py

test: pytest

lint: $(ready)
	$(bin)/ruff check $(python_sources)
	$(bin)/ruff format --check $(python_sources)

types: $(ready) lint
	$(bin)/mypy

native: $(ready) types
	PATH="$(abspath $(bin)):$$PATH" scripts/native-tests release

# Last, so that its closing line is the last. One thread a process: there are tests with several ranks. A file is
# a worker's as a whole, so that what its tests share is made once, in the order that tests/conftest.py gives.
pytest: $(ready) lint types native
	OMP_NUM_THREADS=1 $(python) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Each says by its exit status whether its targets are met; none keeps the next from running.
bench: $(ready)
	-@$(python) benchmarks/throughput.py
	-@$(python) benchmarks/memory.py --run
	-@$(python) benchmarks/observing.py
	-@$(python) benchmarks/links.py
	-@$(python) benchmarks/rpc.py
	-@$(python) benchmarks/scheduler.py
	-@$(python) benchmarks/auction.py
	-@$(python) benchmarks/codec.py

bench-training: $(ready)
	-@$(python) benchmarks/training.py

bench-cluster: $(ready)
	-@$(python) benchmarks/cluster.py --picture bench-out/cluster.svg
	-@$(python) benchmarks/prediction.py --quotas --repetitions 1

clean:
	rm -rf .venv build demo-out bench-out src-native/build-* pipeedge/_native*.so *.egg-info \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
