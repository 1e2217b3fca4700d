# The same few commands for people and for CI. Each creates the environment first if necessary.
#
#   make demo       run two ranks on this machine with real models and data; results in demo-out/
#   make test       run lint, types and tests
#   make bench      compare throughput, memory, links, scheduler and codec with their targets (minutes, on an idle machine)
#   make bench-training    compare every training schedule with one process (minutes, on an idle machine)
#   make bench-cluster     run ViT-Base and BERT-Base on emulated clusters (as root; two hours)
#   make setup      create only the environment
#   make clean      remove everything that these commands created, including the environment
#
#   PYTHON=...      interpreter for the environment, 3.11 or newer
#   VENV=...        directory of the environment; an existing one is completed
#   JOBS=...        number of processes that run the tests (4: those of real ranks mostly wait)
#   TORCH_INDEX=... package index to install torch from, e.g. one with CPU builds, or with a certain CUDA;
#                   only needed once, with setup

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 4
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types native pytest bench bench-training bench-cluster clean
.DELETE_ON_ERROR:

# Where the environment tells Python to keep no bytecode, as images of containers do, each of the many processes
# of the tests would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE =

bin := $(VENV)/bin
python := $(bin)/python
ready := $(VENV)/.pipeedge-ready
native_sources := $(wildcard src-native/CMakeLists.txt src-native/*/*.[ch]pp src-native/*/*.inc)
python_sources := pipeedge tests tools benchmarks $(wildcard *.py) scripts/pin-dependencies

help:
	@sed -n '/^#   /s/^#   //p' Makefile

# Set-up is repeated when one of its inputs changes; it writes the stamp last.
$(ready): pyproject.toml constraints.txt setup.py CMakeLists.txt scripts/setup $(native_sources)
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup "$(VENV)"
	@touch $@

# Another index for torch means another torch, even if one is installed.
ifneq ($(TORCH_INDEX),)
.PHONY: other_torch
$(ready): other_torch
endif

setup: $(ready)

demo: $(ready)
	@$(python) tools/demo.py

# The types are checked beside the tests: one process, which would leave a core idle for half a minute.
test: lint native
	@$(MAKE) --no-print-directory -j 2 types pytest

lint: $(ready)
	$(bin)/ruff check $(python_sources)
	$(bin)/ruff format --check $(python_sources)

types: $(ready)
	$(bin)/mypy

native: $(ready)
	scripts/check-native
	$(bin)/ctest --test-dir build/native/_skbuild/src-native --output-on-failure --timeout 300

# Processes have one thread each, because some tests run several ranks. Each file runs on one worker, so that shared
# fixtures are created once, in the order of tests/conftest.py.
pytest: $(ready)
	OMP_NUM_THREADS=1 $(python) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The exit status of each says whether its targets are met; the next one runs in any case.
bench: $(ready)
	-@$(python) benchmarks/throughput.py
	-@$(python) benchmarks/start.py
	-@$(python) benchmarks/memory.py --run
	-@$(python) benchmarks/observing.py
	-@$(python) benchmarks/links.py
	-@$(python) benchmarks/transports.py
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
