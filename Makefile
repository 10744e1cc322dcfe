# `make demo` and `make test` do everything on a fresh machine; a second run starts at once.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: bench demo test lint types unit test-slow bench-jsonl bench-headers bench-estimate bench-count system clean

demo: $(READY)
	$(BIN)/python -m packhorse.cli.demo

test: system lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2 -m "not slow" -q

test-slow: $(READY)
	$(BIN)/pytest -m slow -q

bench: $(READY)
	$(BIN)/packhorse bench

bench-jsonl: $(READY)
	$(BIN)/python benchmarks/jsonl.py

bench-headers: $(READY)
	$(BIN)/python benchmarks/headers.py

bench-estimate: $(READY)
	$(BIN)/python benchmarks/estimate.py

bench-count: $(READY)
	$(BIN)/python benchmarks/count.py --processor $(PROCESSOR)

# Everything the demo and the tests import. Rebuilt when the declared dependencies change.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Without its dependencies: there is no torchvision for the CPU build of torch. Its transforms, which the
	# processors use, work beside it (tests/contract/torchvision_ops.py).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchvision
	touch $@

# torchcodec (one of three video backends) loads the system's FFmpeg libraries; the pages of the viewer are
# tested in the system's Chromium.
system:
	@MISSING=""; \
	ldconfig -p | grep -q libavcodec || MISSING="ffmpeg"; \
	test -x /usr/bin/chromium || MISSING="$$MISSING chromium"; \
	if [ -n "$$MISSING" ]; then \
	  echo "installing $$MISSING (for the tests)"; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive $$SUDO apt-get install -y -qq --no-install-recommends $$MISSING; \
	fi

clean:
	rm -rf $(VENV) demo demo-data .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
