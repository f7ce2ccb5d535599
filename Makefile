# Everything runs in .venv. PIP_FIND_LINKS is passed on to uv, so it finds the same wheels as pip.
# On machines where torch's default build is the CUDA one, UV_TORCH_BACKEND=cpu selects the smaller CPU build.
BIN := .venv/bin
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Let Python cache bytecode: without the cache, importing torch and torchrec takes ten seconds more in every process.
unexport PYTHONDONTWRITEBYTECODE
DEMO ?= demo
COMERA := $(BIN)/comera
TRAIN = $(COMERA) train --config examples/demo.toml data.path=$(DEMO)/data

.PHONY: install demo test test-sanitized mutate lint docs dist bench gpu clean
.DEFAULT_GOAL := install

install: .venv/installed

# The operators of comera_rec/csrc are compiled against the torch in .venv, hence no build isolation.
.venv/installed: pyproject.toml hatch_build.py $(wildcard comera_rec/csrc/* data_pipeline/csrc/*)
	test -x $(BIN)/python || python3 -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra cpu --extra dev
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps -e .
	touch $@

# Replaces only a folder that it made itself.
demo: install
	@test -z "$$(ls -A $(DEMO) 2>/dev/null)" || test -e $(DEMO)/.demo || \
		{ echo "$(DEMO) holds files that make demo didn't write: name another folder, as in make demo DEMO=folder"; exit 1; }
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	touch $(DEMO)/.demo
	$(COMERA) synth --rows 500000 --seed 1 --output $(DEMO)/raw/train.txt
	$(COMERA) preprocess --input $(DEMO)/raw/train.txt --output $(DEMO)/data --min-count 1
	$(TRAIN) output=$(DEMO)/dense tables.format=dense linears.format=dense ranks=none optimizer.lr_tables=0.025
	$(TRAIN) output=$(DEMO)/compressed
	$(COMERA) report --run $(DEMO)/dense --run $(DEMO)/compressed \
		--truth $(DEMO)/raw/train.truth.json --output $(DEMO)/report.html

# One process per core, up to eight. The tests that belong together, the longest group, come first (tests/conftest.py).
test: install
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadscope

# Runs the compiled code's tests under the address and undefined-behavior sanitizers, with separately built libraries. A fault ends
# its process with a report; PYTHONMALLOC=malloc bypasses Python's own allocator, which hides accesses beyond an array.
SANITIZED := build/sanitized
test-sanitized: install
	COMERA_SANITIZE=1 $(BIN)/python -c "from pathlib import Path; from hatch_build import build, build_pipeline; \
		build(Path('.'), Path('$(SANITIZED)/libcomera_rec.so')); \
		build_pipeline(Path('.'), Path('$(SANITIZED)/libdata_pipeline.so'))"
	rm -f $(SANITIZED)/report.*
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:log_path=$(SANITIZED)/report PYTHONMALLOC=malloc \
		COMERA_LIBRARY=$(SANITIZED)/libcomera_rec.so DATA_PIPELINE_LIBRARY=$(SANITIZED)/libdata_pipeline.so \
		$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 tests/ops/test_plan.py tests/ops/test_bags.py \
		tests/ops/test_bags_refused.py tests/ops/test_updates.py tests/ops/test_lookup.py tests/ops/test_served_bags.py \
		tests/recsys/test_interaction.py tests/data_pipeline/test_parse.py tests/data_pipeline/test_cells.py \
		|| { cat $(SANITIZED)/report.*; exit 1; }

# Runs the tests of a package against mutants of it: always the same sample, those whose number within their function ends in SAMPLE.
# TESTS may name the fast ones, or be any of pytest's arguments that select tests, such as --ignore=FILE.
MUTATE ?= comera_rec/rank
SAMPLE ?= 7
TESTS ?= tests/$(notdir $(MUTATE))
MUTATED := build/mutate
mutate: install
	$(BIN)/uv pip install --quiet --python $(BIN)/python "mutmut>=3.8"
	rm -rf $(MUTATED) && mkdir -p $(MUTATED)
	git ls-files -z -- ':!benchmarks/results' | xargs -0 cp --parents --target-directory=$(MUTATED)
	cp -r comera_rec/lib $(MUTATED)/comera_rec && cp -r data_pipeline/lib $(MUTATED)/data_pipeline
	printf '%s\n' '[tool.mutmut]' 'source_paths = ["comera_rec", "data_pipeline"]' 'only_mutate = ["$(MUTATE)/*"]' \
		'pytest_add_cli_args_test_selection = [$(foreach test,$(TESTS),"$(test)",)]' >> $(MUTATED)/pyproject.toml
	cd $(MUTATED) && $(CURDIR)/$(BIN)/python -m mutmut run --max-children 2 '$(subst /,.,$(MUTATE)).*__mutmut_*$(SAMPLE)'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tables must be those of the committed rows. Warnings are errors, including those about dead links between pages.
docs: install
	$(BIN)/python -m benchmarks.pages --check
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

# Builds and checks a wheel and an sdist, then trains, exports and serves with the wheel in an environment without extras.
DIST_PYTHON ?= 3.11
DIST_WITH ?= torch==2.13.* torchrec==1.8.* fbgemm-gpu-cpu==1.8.*
dist: install
	rm -rf dist build/clean && mkdir -p build
	$(BIN)/uv pip install --quiet --python $(BIN)/python build twine
	$(BIN)/python -m build --no-isolation --sdist --wheel --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/uv venv --quiet --python $(DIST_PYTHON) build/clean
	echo "fbgemm-gpu ; python_version < '3'" > build/overrides.txt
	$(BIN)/uv pip install --quiet --python build/clean/bin/python --overrides build/overrides.txt $(DIST_WITH) dist/*.whl
	cd build/clean && bin/python $(CURDIR)/tests/core_alone.py

bench: install
	$(BIN)/python -m benchmarks.run all --quick

# Tests and measures on a GPU what the installed packages allow, in ten minutes; run it again to resume. Any PYTHON with torch works.
PYTHON ?= $(BIN)/python
gpu:
	$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv build dist demo *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
