# Every target makes .venv and installs what it needs; nothing is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-models test-gpu lint docs package bench soak chaos clean

demo: $(INSTALLED)
	$(BIN)/safer demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# The whole listing of models in tests/models/families, of which `make test` takes a few.
test-models: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m models

# On a machine with a GPU: the tests that need one, which `make test` skips elsewhere.
test-gpu: $(INSTALLED)
	$(BIN)/python -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no CUDA device here')"
	$(BIN)/python -m pytest -m cuda

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py

docs: $(INSTALLED)
	$(BIN)/mkdocs build --quiet --site-dir build/site

# Wheel and sdist; then the wheel alone in an environment that has torch and numpy and nothing else.
package: $(INSTALLED)
	rm -rf dist build/clean
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	build/clean/bin/pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cd build && clean/bin/python -I ../tests/clean.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/speed.py --out demo/speed.csv

soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py --out demo/soak.csv

chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py --minutes 30 --out demo/chaos.csv

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
