# Everything runs in .venv; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Options of the demo, such as DEMO="--short". ROOT is where it keeps its run.
DEMO ?=
# Options of the benchmarks, such as BENCH="--quick".
BENCH ?=
ROOT ?= build/demo/run
# How many tests run at the same time.
WORKERS ?= 3

.PHONY: help setup demo test fuzz check bench format clean

help:
	@echo "make setup   install everything into $(VENV) (again only when pyproject.toml changes)"
	@echo "make demo    train, kill, resume, publish, serve and restore on MovieLens-100k"
	@echo "make test    run all tests"
	@echo "make fuzz    run the randomised tests on new random examples"
	@echo "make check   lint, format, types and import layers"
	@echo "make bench   run the benchmarks"
	@echo "make format  reformat the code"
	@echo "make clean   remove build/ and caches, keep $(VENV)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt Makefile hatch_build.py ckpt/_rows.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@echo "== torch =="
	$(BIN)/python -m pip install -c constraints.txt torch numpy
	@echo "== torchrec, with the fbgemm that fits this torch =="
	$(BIN)/python -m pip install -c constraints.txt \
	  $$($(BIN)/python -c 'import torch; print("fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu")') \
	  torchmetrics tensordict tqdm pyre-extensions
	# Without dependencies: torchrec asks for fbgemm-gpu, the CUDA build, by name; of recbole only the data is used.
	$(BIN)/python -m pip install -c constraints.txt --no-deps torchrec recbole
	@echo "== sidestage =="
	$(BIN)/python -m pip install -c constraints.txt -e '.[serve,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m benchmarks.demo --root $(ROOT) $(DEMO)

# Many tests wait for processes that they started, so there are more workers than cores; a file stays on one.
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Randomised tests take the same examples in each run of `make test`; here they take new ones.
fuzz: $(READY)
	SIDESTAGE_FUZZ=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	  $$(grep -rlE '^from hypothesis' tests --include='test_*.py') tests/guarded/adversaries

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: $(READY)
	for name in limits stall memory interference persist restore proof scale publish freshness serve fleet; do \
	  $(BIN)/python -m benchmarks $$name --json build/benchmarks/$$name.json $(BENCH) || exit 1; \
	done

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ckpt publisher trainer tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
