# Everything runs in .venv. PIP_FIND_LINKS is respected, so wheels that pip is configured to see are seen here too.
# On machines where torch's default build is the CUDA one, UV_TORCH_BACKEND=cpu picks the smaller CPU build.
BIN := .venv/bin
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Modules are compiled once: without that, a process takes ten seconds more to import torch and torchrec.
unexport PYTHONDONTWRITEBYTECODE
DEMO ?= demo
COMERA := $(BIN)/comera
TRAIN = $(COMERA) train --config examples/demo.toml data.path=$(DEMO)/data

.PHONY: install demo test test-sanitized lint docs bench gpu clean
.DEFAULT_GOAL := install

install: .venv/installed

# The operators of comera_rec/csrc are compiled against the torch of .venv, hence no build isolation.
.venv/installed: pyproject.toml hatch_build.py $(wildcard comera_rec/csrc/* data_pipeline/csrc/*)
	test -x $(BIN)/python || python3 -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra cpu --extra dev
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps -e .
	touch $@

demo: install
	rm -rf $(DEMO)
	$(COMERA) synth --rows 500000 --seed 1 --output $(DEMO)/raw/train.txt
	$(COMERA) preprocess --input $(DEMO)/raw/train.txt --output $(DEMO)/data --min-count 1
	$(TRAIN) output=$(DEMO)/integers tables.format=off linears.format=dense ranks=none
	$(TRAIN) output=$(DEMO)/dense tables.format=dense linears.format=dense ranks=none optimizer.lr_tables=0.025
	$(TRAIN) output=$(DEMO)/compressed
	$(COMERA) report --run $(DEMO)/dense --run $(DEMO)/compressed --run $(DEMO)/integers \
		--truth $(DEMO)/raw/train.truth.json --output $(DEMO)/report.html

# One process a core, up to eight.
test: install
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadscope

# Address and undefined-behaviour sanitizers over the tests of the compiled code, with libraries of its own; -s, or pytest hides reports,
# and without Python's own allocator, which hides what lies beside an array.
SANITIZED := build/sanitized
test-sanitized: install
	COMERA_SANITIZE=1 $(BIN)/python -c "from pathlib import Path; from hatch_build import build, build_pipeline; \
		build(Path('.'), Path('$(SANITIZED)/libcomera_rec.so')); \
		build_pipeline(Path('.'), Path('$(SANITIZED)/libdata_pipeline.so'))"
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		COMERA_LIBRARY=$(SANITIZED)/libcomera_rec.so DATA_PIPELINE_LIBRARY=$(SANITIZED)/libdata_pipeline.so \
		$(BIN)/python -m pytest -s tests/ops/test_plan.py tests/ops/test_bags.py tests/ops/test_bags_refused.py tests/ops/test_updates.py tests/ops/test_lookup.py \
		tests/ops/test_served_bags.py tests/data_pipeline/test_parse.py tests/data_pipeline/test_hashing.py \
		tests/data_pipeline/test_runs.py::test_counts_equal_a_dictionary

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings, dead links between pages among them, are errors.
docs: install
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

bench: install
	$(BIN)/python -m benchmarks.run all --quick

# Tests and measures on a GPU what the installed packages allow, in ten minutes; run it again to resume. PYTHON is any that has torch.
PYTHON ?= $(BIN)/python
gpu:
	$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv build dist demo *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
