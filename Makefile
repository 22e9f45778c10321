# Every target makes .venv and installs what it needs; nothing is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench soak clean

demo: $(INSTALLED)
	$(BIN)/safer demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python benchmarks/speed.py run --out demo/speed.jsonl

soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py run --out demo/soak.jsonl

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
