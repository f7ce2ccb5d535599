# Everything runs in .venv. PIP_FIND_LINKS is respected, so wheels that pip is configured to see are seen here too.
# On machines where torch's default build is the CUDA one, UV_TORCH_BACKEND=cpu picks the smaller CPU build.
BIN := .venv/bin
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
DEMO ?= demo
COMERA := $(BIN)/comera
TRAIN = $(COMERA) train --config examples/demo.toml data.path=$(DEMO)/data

.PHONY: install demo test lint bench clean clean-kernels
.DEFAULT_GOAL := install

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || python3 -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[cpu,dev,triton]'
	touch $@

demo: install
	rm -rf $(DEMO)
	$(COMERA) synth --rows 500000 --scale 0.1 --seed 1 --output $(DEMO)/raw/train.txt
	$(COMERA) preprocess --input $(DEMO)/raw/train.txt --output $(DEMO)/data
	$(TRAIN) output=$(DEMO)/integers tables.format=off linears.format=dense ranks=none
	$(TRAIN) output=$(DEMO)/dense tables.format=dense linears.format=dense ranks=none
	$(TRAIN) output=$(DEMO)/compressed
	$(COMERA) report --run $(DEMO)/dense --run $(DEMO)/compressed --run $(DEMO)/integers \
		--truth $(DEMO)/raw/train.truth.json --output $(DEMO)/report.html

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.run all --quick

clean-kernels:
	find comera_rec -name '*.nb[ic]' -delete

clean:
	rm -rf .venv build dist demo *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
