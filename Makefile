# Two commands on a fresh machine: `make up` starts a pool, `make test` checks everything.
# Only Python >= 3.11, pip and make are assumed; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
RETRY := $(BIN)/python -m tests.retries
# Tests marked `slow` run in CI and in `make soak`; on a laptop `make test` leaves them out.
NOT_SLOW := $(if $(filter true,$(CI)),, and not slow)

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --custom-compile-command 'make lock' --quiet

.PHONY: help setup up test alone pure check bench soak docs lock wheels release site recording system engines contracts browser clean
.DELETE_ON_ERROR:

help:                       ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

# ---- setting up: each stamp is older than what it was made from exactly when something changed

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"gpool needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements/all.txt requirements/build.txt pyproject.toml | $(VENV)/pyvenv.cfg
	$(PIP) install --require-hashes -r requirements/all.txt -r requirements/build.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: requirements/dev.txt $(VENV)/.installed
	$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.installed-dev  ## everything for work on gpool, into .venv

# ---- using

up: $(VENV)/.installed      ## start a pool on this machine: server, agent, embedded store; ARGS="--port 9000" adds options
	$(BIN)/gpool up $(ARGS)

# ---- checking

test: system setup engines contracts browser check  ## lint, types, contracts, then every test
	$(RETRY) -n $(WORKERS) -m 'not alone$(NOT_SLOW)' --ignore tests/core --ignore tests/world
	@echo 'the last part takes some five minutes, and is shown when it is done'
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target alone pure

# What looks at the whole host runs while nothing else touches it; beside it, what only computes.
alone: setup
	$(RETRY) -m 'alone$(NOT_SLOW)'

pure: setup
	$(BIN)/python -m pytest -m 'not alone$(NOT_SLOW)' tests/core tests/world

check: setup                ## lint, types, import contracts, structure, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src tests/tools
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.structure --check
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/house/test_repository.py
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/server/identity_routes/test_matrix.py -k row \
		|| { echo 'a route has no row in the matrix of who gets what'; exit 1; }
	$(BIN)/python -m gpool.core.lifecycle | diff -u docs/lifecycle.md - \
		|| { echo 'docs/lifecycle.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.core.money.charging | diff -u docs/charges.md - \
		|| { echo 'docs/charges.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.core.permissions | diff -u docs/permissions.md - \
		|| { echo 'docs/permissions.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.wire.events | diff -u docs/events.md - \
		|| { echo 'docs/events.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.agent.state_machine.transitions | diff -u docs/agent-lifecycle.md - \
		|| { echo 'docs/agent-lifecycle.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.client.options | diff -u docs/options.md - \
		|| { echo 'docs/options.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m tests.tools.settings_page | diff -u docs/settings.md - \
		|| { echo 'docs/settings.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.server.metrics | diff -u docs/metrics.md - \
		|| { echo 'docs/metrics.md is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.server.alerts.rules | diff -u deploy/monitoring/rules.yml - \
		|| { echo 'deploy/monitoring/rules.yml is stale: run make docs'; exit 1; }
	$(BIN)/python -m tests.tools.alert_cases | diff -u deploy/monitoring/rules_test.yml - \
		|| { echo 'deploy/monitoring/rules_test.yml is stale: run make docs'; exit 1; }
	$(BIN)/python -m tests.tools.dashboards deploy/monitoring/grafana --check
	$(BIN)/python -m gpool.server.store.row_generator | diff -u src/gpool/server/store/generated_rows.py - \
		|| { echo 'server/store/generated_rows.py is stale: run make docs'; exit 1; }
	$(BIN)/python -m gpool.observability.ecs | diff -u deploy/logging/elasticsearch/index-template.json - \
		|| { echo 'deploy/logging/elasticsearch/index-template.json is stale: run make docs'; exit 1; }

# In CI, as root, what requirements/apt.txt lists is installed, so that nothing has to be skipped.
system:
ifeq ($(CI),true)
	@packages="$$(sed -e 's/#.*//' requirements/apt.txt | xargs)"; \
	if [ -n "$$packages" ] && [ "$$(id -u)" = 0 ] && ! dpkg -s $$packages >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages; \
	fi
endif

# ... and so are torch and Ray: gigabytes in some places, so elsewhere only by this word.
engines: setup              ## torch and Ray, which tests of gangs start; without them those are skipped
ifneq ($(filter true,$(CI))$(filter engines,$(MAKECMDGOALS)),)
	@$(BIN)/python -c 'import torch, ray' 2>/dev/null || $(PIP) install -r requirements/engines.txt
endif

# ... and the Solidity compiler and a local EVM, by name and version, into a folder that git ignores.
contracts:                  ## tools that build and test the distributor contract; without them its tests are skipped
ifneq ($(filter true,$(CI))$(filter contracts,$(MAKECMDGOALS)),)
	@test -d contracts/node_modules/solc -a -d contracts/node_modules/@foundry-rs -a -d contracts/node_modules/@openzeppelin \
		|| npm install --prefix contracts --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		|| echo 'npm could not install the tools of contracts/; the tests of the contract say what is missing'
endif

# ... and the accessibility rules that are run in the pages.
browser:                    ## axe-core, which tests of the pages run; without it those are skipped
ifneq ($(filter true,$(CI))$(filter browser,$(MAKECMDGOALS)),)
	@test -d tests/browser/node_modules/axe-core \
		|| npm install --prefix tests/browser --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error \
		|| echo 'npm could not install axe-core; the tests of the pages say what is missing'
endif

soak: setup                 ## hours instead of minutes: more seeds, more kills
	GPOOL_SOAK=1 $(PYTEST) -o faulthandler_timeout=0 tests/world tests/e2e tests/store
	$(BIN)/python -m bench.run --full

bench: setup                ## every benchmark that needs nothing but gpool; tables here, JSON in bench/results
	$(BIN)/python -m bench.run

# ---- making

docs: setup                 ## write the generated pages again
	$(BIN)/python -m gpool.core.lifecycle > docs/lifecycle.md
	$(BIN)/python -m gpool.core.money.charging > docs/charges.md
	$(BIN)/python -m gpool.core.permissions > docs/permissions.md
	$(BIN)/python -m gpool.wire.events > docs/events.md
	$(BIN)/python -m gpool.agent.state_machine.transitions > docs/agent-lifecycle.md
	$(BIN)/python -m gpool.client.options > docs/options.md
	$(BIN)/python -m tests.tools.settings_page > docs/settings.md
	$(BIN)/python -m gpool.server.metrics > docs/metrics.md
	$(BIN)/python -m gpool.server.alerts.rules > deploy/monitoring/rules.yml
	$(BIN)/python -m tests.tools.alert_cases > deploy/monitoring/rules_test.yml
	$(BIN)/python -m tests.tools.dashboards deploy/monitoring/grafana
	$(BIN)/python -m gpool.server.store.row_generator > .generated_rows && mv .generated_rows src/gpool/server/store/generated_rows.py
	$(BIN)/python -m gpool.observability.ecs > deploy/logging/elasticsearch/index-template.json

lock: $(VENV)/pyvenv.cfg    ## resolve requirements/*.txt again
	@command -v uv >/dev/null || $(PIP) install uv
	PATH="$$PATH:$(CURDIR)/$(BIN)"; export PATH; set -e; \
	$(COMPILE) $(UPGRADE) pyproject.toml --all-extras --group dev --group build -o requirements/dev.txt; \
	$(COMPILE) pyproject.toml --extra all -c requirements/dev.txt -o requirements/all.txt; \
	$(COMPILE) --group build -c requirements/dev.txt -o requirements/build.txt; \
	$(COMPILE) pyproject.toml -c requirements/dev.txt -o requirements/base.txt; \
	$(COMPILE) pyproject.toml --extra server --extra postgres --extra s3 -c requirements/dev.txt -o requirements/server.txt; \
	$(COMPILE) pyproject.toml --extra agent --extra environments -c requirements/dev.txt -o requirements/agent.txt

# Wheels for this interpreter and machine: what deploy/docker/Dockerfile installs without network.
wheels: setup               ## download and build the wheels of the images
	rm -rf deploy/docker/wheels
	$(PIP) download --require-hashes --only-binary :all: -r requirements/server.txt -d deploy/docker/wheels
	$(PIP) download --require-hashes --only-binary :all: -r requirements/agent.txt -d deploy/docker/wheels
	$(PIP) wheel --no-deps --no-build-isolation -w deploy/docker/wheels .

# The version is the git tag; the test installs the files of dist/ and runs a first task from them.
release: setup              ## wheel and sdist in dist/, checked and tried in empty environments
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/twine check --strict dist/*
	GPOOL_DIST=$(CURDIR)/dist $(BIN)/python -m pytest -q tests/e2e/test_release.py

recording: setup            ## record the terminal session of README.md (needs tmux)
	$(BIN)/python -m tests.tools.recording docs/screenshots/terminal.svg

# Pages are copied with what is generated from code, since the site shows files below one folder only.
site: setup                 ## build the documentation site, offline, into site/
	$(BIN)/python -m tests.tools.site build/site
	$(BIN)/zensical build --strict --clean -f build/site/mkdocs.yml
	rm -rf site && mv build/site/site site

clean:                      ## remove what was built
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site
