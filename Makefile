# Needs python3 (3.10-3.13) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test secured ui lint format bench faults docs compat package clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

setup: $(VENV)/.installed

demo: setup
	@$(BIN)/python -m kmirror_dagster.demo $(if $(CHECK),--check)

test: setup
	# Most tests wait for real processes: two workers, each with clusters of its own, halve the time.
	# (They must collect the same tests in the same order: hence the seed.) A test may fail once on a busy machine; the last lines count such reruns.
	PYTHONHASHSEED=0 $(BIN)/python -m pytest tests -m 'not faults and not ui' -n 2 --dist loadfile --reruns 1 --durations=25

# Needs Chromium and chromedriver.
ui: setup
	$(BIN)/python -m pytest tests/ui -m ui --reruns 1 --durations=5

# The tests that use brokers, on clusters with TLS, SASL and an authorizer: mirrors and nodes have the rights that
# docs/security.md lists, and no more.
secured: setup
	PYTHONHASHSEED=0 $(BIN)/python -m pytest tests/integration --secured -m 'not faults' -n 2 --dist loadfile --reruns 1 --durations=15

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

faults: setup
	$(BIN)/python -m pytest tests -m faults --timeout 3600

# Both files of a release in dist/, checked, installed into an empty environment and used there.
package: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest tests/faults/test_package.py

# WORKLOAD="bulk wan": some only; QUICK=1: fewer records; TURNS=3: more rounds; BENCH_HOME=DIR: keep the data.
# The page is of full runs.
bench: setup
	$(BIN)/python -m bench $(WORKLOAD) $(if $(QUICK),--quick) $(if $(TURNS),--turns $(TURNS)) \
		$(if $(BENCH_HOME),--home $(BENCH_HOME))
	$(if $(QUICK),,$(BIN)/python -m bench.report)

# Writes the generated pages, then the site into build/site; a link that leads nowhere is an error.
docs: setup
	$(BIN)/python -m docs.generators
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# ONLY="kafka --only 3.9": some combinations. Writes docs/compatibility.md; all of it takes the better part of an hour.
compat: setup
	$(BIN)/python -m tests.compat $(ONLY)

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache
