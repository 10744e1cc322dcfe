# `make demo` and `make test` install everything first; later runs start immediately.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Many container images set it; each test process, and each program that a test starts, would then compile the
# tests and the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench bench-quick demo docs test lint types unit test-system test-slow system clean

demo: $(READY)
	$(BIN)/python -m packhorse demo

# Three processes for two cores: many tests wait for a process or a time limit. The tests of a file stay in one
# process and share its fixtures.
XDIST := -n 3 --dist loadfile
# gloo sometimes fails to connect a job's processes while another job starts on the machine (3 in 100 starts with
# four jobs side by side, none of 150 alone): nothing of this project has run then. Every other failure counts.
GLOO  := --reruns 3 --only-rerun "Gloo connectFullMesh failed"
UNIT  := $(BIN)/pytest $(XDIST) $(GLOO) -m "not slow and not system" -q --durations=15

# mypy runs at the same time as the tests; its report comes last.
test: system lint
	@$(BIN)/mypy > $(VENV)/mypy.txt 2>&1 & MYPY=$$!; \
	$(UNIT); TESTS=$$?; \
	wait $$MYPY; TYPES=$$?; cat $(VENV)/mypy.txt; \
	exit $$((TESTS || TYPES))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(UNIT)

# Ray clusters, torchrun, ranks and runs that are killed, the viewer in a browser. CI runs `make test` and this.
# Two processes, because these tests start several themselves.
test-system: system $(READY)
	$(BIN)/pytest -n 2 --dist loadfile $(GLOO) -m "system and not slow" -q --durations=15

# The documentation as a site in site/; warnings are errors (mkdocs.yml). `make unit` builds it too.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built: $(BIN)/python -m http.server -d site"

test-slow: $(READY)
	$(BIN)/pytest -m slow -q

.PHONY: fuzz coverage test-lowest test-newest

# Fuzz each reader for SECONDS, longer than the tests do.
SECONDS ?= 60
fuzz: $(READY)
	$(BIN)/python benchmarks/fuzz.py --seconds $(SECONDS)

# Lines that no test runs, including child processes; pyproject.toml has the required share.
coverage: $(READY)
	$(BIN)/pytest $(XDIST) -m "not slow" --cov=packhorse --cov-report=term-missing:skip-covered

# The oldest versions that pyproject.toml allows, on the oldest Python; and the newest versions, without
# constraints.txt. Each has its own environment (some gigabytes with the CUDA build of torch), and so has uv,
# which can resolve the oldest versions. They run the tests that depend on other libraries: all tests would take
# half an hour. decord is installed because qwen-omni-utils otherwise calls torchvision.io.read_video, which newer
# torchvision does not have.
OLDEST_PYTHON ?= 3.10
OLDEST_TRANSFORMERS := transformers==5.12.1
JOBS ?= 2
UV := $(VENV)-uv/bin/uv
EXTRAS := video,audio,hub,lmdb,view,trainer
TEST_PACKAGES := 'pytest>=8.2' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'num2words>=0.5.13' 'psutil>=5.9' \
  'torchvision>=0.21' 'librosa>=0.11' 'qwen-omni-utils>=0.0.9' 'decord>=0.6' 'tensorboard>=2.16'
RANGE_TESTS := tests/unit/rows tests/unit/formats tests/unit/encode tests/unit/plan tests/unit/collate \
  tests/unit/count tests/unit/integrations/test_prepare.py tests/unit/integrations/test_trainer.py \
  tests/unit/loader/test_loader.py tests/unit/integrations/test_shift_labels.py tests/property/test_plan.py tests/property/test_schedule.py
# Families that need a newer transformers are skipped (Family.min_transformers).
RANGE_CONTRACT := tests/contract/test_collate.py tests/contract/test_model_inputs.py \
  tests/contract/test_packed.py tests/contract/test_versions.py

test-lowest: $(UV)
	$(UV) venv --quiet --clear --python $(OLDEST_PYTHON) $(VENV)-lowest
	$(UV) pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct \
	  -e '.[$(EXTRAS)]' $(TEST_PACKAGES) '$(OLDEST_TRANSFORMERS)'
	$(call range-tests,$(VENV)-lowest)

test-newest: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(VENV)-newest
	$(UV) pip install --quiet --python $(VENV)-newest/bin/python --upgrade -e '.[$(EXTRAS)]' $(TEST_PACKAGES)
	$(call range-tests,$(VENV)-newest)

define range-tests
$(UV) pip list --quiet --python $(1)/bin/python | grep -E '^(accelerate|numpy|pyarrow|scipy|torch|transformers) '
$(1)/bin/python -m pytest -n $(JOBS) --dist loadfile -q -m "not slow" $(RANGE_TESTS) $(RANGE_CONTRACT)
endef

$(UV):
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/python -m pip install --quiet --disable-pip-version-check uv

bench: $(READY)
	$(BIN)/python benchmarks/run.py

# For CI: every script with small sizes and half of each speed target. Writes nothing.
bench-quick: $(READY)
	$(BIN)/python benchmarks/run.py --quick

# One script, for example `make bench-jsonl`.
bench-%: $(READY)
	$(BIN)/python benchmarks/$*.py

# The environment of the demo and the tests. Rebuilt when the declared dependencies change.
$(READY): pyproject.toml constraints.txt scripts/torchvision_help.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Without its dependencies: there is no torchvision for the CPU build of torch. Its transforms, which the
	# processors use, work with that build; scripts/torchvision_help.py, run by the .pth file, lets it import.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchvision
	cp scripts/torchvision_help.py "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	echo 'import torchvision_help; torchvision_help.help_torchvision()' \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision_help.pth"
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
	rm -rf $(VENV) $(VENV)-uv $(VENV)-lowest $(VENV)-newest demo demo-data site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
