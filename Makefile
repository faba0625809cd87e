# One command a verb. Everything runs inside .venv, which `make install` creates; nothing is installed elsewhere.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp

.PHONY: install
install: $(STAMP)

# torch comes first, at one exact version, so that the range in pyproject.toml finds it there and pulls nothing.
# A CUDA build of torch brings the triton that it was built with. A CPU build brings none: it gets the version
# whose interpreter runs the kernel tests.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip show --quiet triton 2>/dev/null || $(BIN)/python -m pip install --quiet 'triton==3.6.0'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $(STAMP)

# The 100 % of the core's branches is measured over tests/core; the other folders run after it, those that exist.
# They are left out of `tests` one by one: pytest imports the conftest.py of each folder that it is given before it
# starts its workers, which takes as long as importing torch and transformers.
OTHER_TESTS := tests --ignore=tests/core --ignore=tests/clients --ignore=tests/gpu

# Tests share the machine: torch gets two threads, in every verb, and one where several workers run.
export OMP_NUM_THREADS ?= 2
export MKL_NUM_THREADS ?= 2

# Container images often forbid Python to keep compiled modules. Then every worker compiles every test, and every new
# interpreter the whole package.
unexport PYTHONDONTWRITEBYTECODE

# Two cores are busy with two workers where tests compute (the core's), and with three where a quarter of their time
# is spent on waiting for files, sockets, processes and a browser (the others).
WORKERS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal

# The core's tests run twice: with coverage, and as `python -O` runs them, without the core's assertions. The variable
# reaches the workers, which the option would not. Every branch is taken without the tests marked `no_cover`, so `-O`
# leaves those out.
.PHONY: test
test: install
	$(WORKERS) -n 2 -m 'not soak' --cov --cov-fail-under=100 tests/core
	PYTHONOPTIMIZE=1 $(WORKERS) -n 2 -m 'not soak and not no_cover' tests/core
	$(WORKERS) -n 3 -m 'not soak' $(OTHER_TESTS)

# The long figures: long simulations, kill -9, load. Servers are new interpreters, not forks (tests/preloaded).
.PHONY: soak
soak: install
	HOLDFAST_TESTS_EXECUTE=1 $(BIN)/python -m pytest -m soak --timeout=0 tests

# Other people's clients, unchanged, against a server of the embedded model. Not all of them install beside each other:
# each requirements file has an environment and a folder of tests. They need several hundred MiB each and no GPU. Clients
# that run on Node are packages of tests/clients/node: its environment brings node and npm, so no other node is needed.
# mini-swe-agent is not here: it calls through litellm.
CLIENTS := .venv-clients

$(CLIENTS)/openai3.stamp: tests/clients/requirements.txt
$(CLIENTS)/openai2.stamp: tests/clients/requirements-openai2.txt
$(CLIENTS)/evaluation.stamp: tests/clients/requirements-evaluation.txt
$(CLIENTS)/%.stamp:
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

# Scripts of packages are not run: claude and opencode, whose packages would link their programs so, are linked by the
# next lines.
NODE_CLIENTS := tests/clients/node
$(CLIENTS)/node.stamp: tests/clients/requirements-node.txt $(NODE_CLIENTS)/package.json $(NODE_CLIENTS)/package-lock.json
	$(PYTHON) -m venv $(CLIENTS)/node
	$(CLIENTS)/node/bin/python -m pip install --quiet --requirement $<
	cd $(NODE_CLIENTS) && PATH=$(CURDIR)/$(CLIENTS)/node/bin:$$PATH npm ci --ignore-scripts --no-audit --no-fund
	cd $(NODE_CLIENTS)/node_modules/@anthropic-ai/claude-code && $(CURDIR)/$(CLIENTS)/node/bin/node install.cjs
	cd $(NODE_CLIENTS)/node_modules/opencode-ai && $(CURDIR)/$(CLIENTS)/node/bin/node postinstall.mjs
	touch $@

# A verb for each environment; `make -k clients` runs the others where one fails. What passed is written down for
# docs/clients.md, which `make check` compares with it. ARGS may leave out all tests of a folder: pytest's status 5.
CLIENT_VERBS := clients-openai3 clients-openai2 clients-evaluation clients-node

.PHONY: clients $(CLIENT_VERBS)
clients: $(CLIENT_VERBS)

$(CLIENT_VERBS): clients-%: install $(CLIENTS)/%.stamp
	HOLDFAST_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS)/$*/bin/python -m pytest tests/clients/$* \
		--results tests/clients/passed.json $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])

# A real Ray cluster of three engines on this machine. Ray (80 MB, many processes) is in an environment of its own that
# sees the packages of the first. It needs PostgreSQL and about 5 GiB of memory.
CLUSTER := .venv-cluster

$(CLUSTER)/installed.stamp: $(STAMP)
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -c 'import pathlib, sys, sysconfig; \
		pathlib.Path(sysconfig.get_path("purelib"), "holdfast.pth").write_text("\n".join(sys.argv[1:]))' \
		$(CURDIR)/src $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(CLUSTER)/bin/python -m pip install --quiet 'ray[serve]>=2.60,<2.61'
	touch $@

.PHONY: cluster-test
cluster-test: install $(CLUSTER)/installed.stamp
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest -m 'not soak' tests/ray $(ARGS)

.PHONY: check
check: install
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/tidy

.PHONY: serve
serve: install
	$(BIN)/holdfast serve $(ARGS)

.PHONY: sim
sim: install
	$(BIN)/holdfast sim $(ARGS)

.PHONY: bench
bench: install
	$(BIN)/holdfast bench core $(ARGS)

# The pictures of the README and of docs/page.md, from a real server. They need a Chromium.
.PHONY: screenshots
screenshots: install
	$(BIN)/python -m tests.web.screenshots $(ARGS)

.PHONY: clean
clean:
	rm -rf $(VENV) $(CLIENTS) $(CLUSTER) $(NODE_CLIENTS)/node_modules .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
