# make demo    CRAFT on the digits data: 50 clients, Dirichlet(0.1), simulated on this machine
# make test    the whole test suite but what takes minutes; make test-slow runs that
# make test-flwr VERSION=1.42.0   the tests on another Flower (TESTS=… for some of them)
# make bench   CPU times as ratios against Flower's own and naive code; BENCH=--quick for a short one
# make check   lint, format, types, layers
# make clean   removes what these made, but not results/
#
# Everything runs in .venv, which is made at need with PYTHON (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo test test-slow test-flwr bench check clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/fedstrat run -c "algorithm=craft craft.server-lr=0.3 dataset.name=digits dataset.alpha=0.1 num-clients=50 num-server-rounds=100"

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m slow

# Another Flower with its own dependencies stands before all else of .venv, so torch is installed once.
OTHER := .venv-flwr-$(or $(VERSION),none)
OTHER_INSTALLED := $(OTHER)/.installed

test-flwr: $(OTHER_INSTALLED)
	$(OTHER)/bin/python -m pytest -m "not e2e and not slow" $(TESTS)

$(OTHER_INSTALLED): $(INSTALLED_DEV)
	@test -n "$(VERSION)" || { echo "Which Flower? For example: make test-flwr VERSION=1.42.0" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]==$(VERSION)'
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(OTHER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-shared.pth"
	@touch $@

bench: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.performance $(BENCH)

check: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-flwr-* dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find fedstrat server_app client_app tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A copied or moved .venv still runs the code of the place where it was made.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
FRESH := yes
.PHONY: $(INSTALLED)
endif

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fedstrat needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' can't make virtual environments; on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(if $(FRESH),$(PYTHON) -m venv --clear $(VENV))
	$(PIP) --editable .
	@echo "$(CURDIR)" > $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) --editable '.[dev]'
	@touch $@
