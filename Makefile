# Every task of a developer. `make` alone lists them; docs/building.md explains what can go wrong.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUB := src/kvasir/native/_native.pyi
STUBGEN := $(BIN)/python -m nanobind.stubgen -q -m kvasir.native._native -p native/stub.pat
NATIVE := $(wildcard native/*.cmake native/*.map native/llama/* native/core/* native/bind/*)
CXX_FILES := $(wildcard native/llama/*.cpp native/llama/*.h native/core/*.?pp native/bind/*.?pp native/tests/*.?pp)
PY_FOLDERS := $(wildcard src tests tools bench)

# Build programs that the system lacks are installed into the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Sanitized code meets uninstrumented archives: a std::vector they share has no annotations there.
ASAN := ASAN_OPTIONS=detect_container_overflow=0 UBSAN_OPTIONS=print_stacktrace=1

.DEFAULT_GOAL := help
.PHONY: help venv build run test test-long test-models check format stubs check-stubs asan bench bump-llama clean

help:  ## list the tasks
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: $(VENV)/.ready  ## create .venv with everything the build and the checks need
$(VENV)/.ready: pyproject.toml tools/requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "kvasir: error: '$(PYTHON)' is not Python 3.11 or newer; install one and say 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "kvasir: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "kvasir: installing development packages"
	@$(BIN)/python tools/requirements.py >$(VENV)/requirements.txt
	@$(BIN)/python -m pip install --quiet --no-compile -r $(VENV)/requirements.txt $$($(BIN)/python tools/llama_cpp.py packages)
	@touch $@

build: $(VENV)/.built  ## build llama.cpp's libraries (once per machine) and the extension
$(VENV)/.built: $(VENV)/.ready CMakeLists.txt pyproject.toml $(NATIVE) tools/llama_cpp.py tools/llama_libs.py tools/llama_source.py
	@$(BIN)/python tools/llama_cpp.py libs >/dev/null
	@echo "kvasir: building the extension"
	@$(BIN)/python -m pip install --no-deps --no-build-isolation --verbose --editable .
	@touch $@

run: build  ## fetch the default model and answer a prompt
	@$(BIN)/kvasir run "Once upon a time"

test: build  ## the tests
	$(BIN)/python -m pytest

test-long: build  ## the tests that take minutes
	$(BIN)/python -m pytest -m long

test-models: build  ## end to end on real weights; KVASIR_TEST_MODEL=path takes any GGUF
	$(BIN)/python -m pytest -m models

check: build check-stubs  ## format, lint, types, import contract, stub, tests: what CI runs
	$(BIN)/ruff format --check $(PY_FOLDERS)
	$(BIN)/ruff check $(PY_FOLDERS)
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

format: venv  ## rewrite the sources in the house format
	$(BIN)/ruff format $(PY_FOLDERS)
	$(BIN)/ruff check --fix $(PY_FOLDERS)
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

stubs: build  ## generate the extension's stub file, which is checked in
	$(STUBGEN) -o $(STUB)

check-stubs: build
	@$(STUBGEN) -o build/_native.pyi
	@diff -u $(STUB) build/_native.pyi || { echo "kvasir: error: $(STUB) is stale; run 'make stubs' and commit it" >&2; exit 1; }

asan: venv  ## native tests under address and undefined-behaviour sanitizers
	@$(BIN)/python tools/llama_cpp.py libs >/dev/null
	cmake -S . -B build/asan $$(command -v ninja >/dev/null && echo -GNinja) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DKVASIR_EXTENSION=OFF -DKVASIR_NATIVE_TESTS=ON -DKVASIR_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/asan
	$(ASAN) build/asan/kvasir_native_tests build/asan/models

bench: build  ## compare with llama.cpp's own programs; BENCH_ARGS="--quick" only sees that it runs
	@peers=$$($(BIN)/python tools/llama_cpp.py peers) && for script in single_stream batching tick cache cache_index eviction; do \
	  KVASIR_PEERS_DIR=$$peers $(BIN)/python bench/$$script.py $(BENCH_ARGS) || exit 1; done

bump-llama: venv  ## move the llama.cpp pin: make bump-llama VERSION=0.3.36
	@test -n "$(VERSION)" || { echo "kvasir: error: say which: make bump-llama VERSION=0.3.36" >&2; exit 1; }
	@$(BIN)/python tools/llama_cpp.py bump $(VERSION)

clean:  ## remove .venv and build/; the shared cache folder stays
	rm -rf $(VENV) build
