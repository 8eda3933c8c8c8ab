# The commands of this repository. `make demo` and `make test` need only Python 3.11+, a C++ compiler and make:
# they create .venv and install everything into it. CMake and Ninja come from the build requirements when missing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN ?=
TESTS ?= tests
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find src -name '*.py' -o -name '*.cpp' -o -name '*.h' \
	-o -name '*.html' -o -name '*.yaml' -o -name '*.typed' 2>/dev/null)

.PHONY: help demo test lint native bench clean

help:
	@echo "make demo     create $(VENV), install zerogap, train a 135M model exactly and write a report"
	@echo "make test     install what the tests need and run them (TESTS=tests/ops for a part)"
	@echo "make lint     ruff check, ruff format --check, mypy"
	@echo "make native   build the CPU kernels into src/zerogap/ops/cpu/ for work in this tree (PYTHONPATH=src)"
	@echo "make bench    run the benchmarks (minutes); results go to benchmarks/results/"
	@echo "make clean    remove $(VENV) and build/"

demo: $(VENV)/installed
	$(BIN)/zerogap demo $(RUN)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest $(TESTS) $(RUN)

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks $(RUN)

# The compiler check comes first: pip buries the same news under a hundred lines.
$(VENV)/python-ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "zerogap needs Python 3.11 or newer: run 'make $(MAKECMDGOALS) PYTHON=/path/to/python3.11'"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
		{ echo "zerogap builds its CPU kernels with a C++17 compiler and found none: install g++ 11 or newer" \
		"(Debian and Ubuntu: apt-get install g++), or set CXX"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/installed: $(VENV)/python-ready $(SOURCES)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt ".[tasks]"
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --group test
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --group lint
	@touch $@

# One build folder per checkout; ccache and Ninja are used where they are.
native:
	cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release \
		$(shell command -v ninja >/dev/null && echo -G Ninja) \
		$(shell command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
	cmake --build build/native --parallel 2
	@# install replaces the files: writing into a library that a running process has mapped would break that process
	install -m 755 build/native/libzerogap_*.so src/zerogap/ops/cpu/

clean:
	rm -rf $(VENV) build
