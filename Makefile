# Two commands on a fresh machine, and nothing before them: `make demo` and `make test`.
# Each first prepares .venv (scripts/bootstrap.py); the second time that takes no time.

# The interpreter of the active environment, if one is active. To choose another: make test PYTHON=python3.12
PYTHON = $(firstword $(wildcard $(filter-out $(CURDIR)/.venv/%, \
	$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python) $(if $(CONDA_PREFIX),$(CONDA_PREFIX)/bin/python))) python3)
PY = .venv/bin/python

# Two pytest workers on two cores, one thread each; more would only fight over them. Tests of one group, such as
# those that share a Ray, run in one worker.
WORKERS = 2
# Extra arguments for pytest, for example: make test ARGS="tests/tokenizer -k chat"
ARGS =

.PHONY: help demo test check format docs bench bench-cpu bench-gpu bench-host bench-load bench-sampler bench-compare clean runtime dev
.DEFAULT_GOAL := help

help:
	@echo "make demo         run a real model: downloads it once, answers a question"
	@echo "make test         the whole test suite on the CPU"
	@echo "make test-sampling   the tests of one package; likewise test-generator, test-serve, ..."
	@echo "make check        formatting, lint, types"
	@echo "make format       let ruff rewrite the files"
	@echo "make docs         the documentation site, in build/site; every link checked"
	@echo "make bench        the benchmarks there are"
	@echo "make bench-cpu    the default model on this processor, beside other engines"
	@echo "make bench-gpu    a 7B EXL2 shape on this GPU: prompt, decode at batches and contexts"
	@echo "make bench-host   the generator's own Python, in a decode step of a model that costs nothing"
	@echo "make bench-load   loading a 7B EXL2 model next to reading its bytes (writes 3.5 GB once)"
	@echo "make bench-sampler   picking tokens, next to multinomial(softmax)"
	@echo "make bench-compare BASE=HEAD~1   another revision and this tree in alternation, with intervals"
	@echo "make clean        remove .venv and every cache"

demo: runtime
	$(PY) scripts/demo.py

test: dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# Tests of one package, as in: make test-sampling
test-%: dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup tests/$* $(ARGS)

check: dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: dev
	$(PY) scripts/build_docs.py

bench:
	@echo "make bench-cpu"
	@echo "make bench-gpu"
	@echo "make bench-host"
	@echo "make bench-load"
	@echo "make bench-sampler"
	@echo "make bench-compare"

# More options, as in: make bench-gpu ARGS="--shape llama-3-8b --cache fp16,q8,q4 --json numbers.json"
bench-cpu: runtime
	EXLM_CPU=1 $(PY) -m exlm.cli bench --device cpu --peers $(ARGS)

bench-gpu: runtime
	$(PY) -m exlm.cli bench --device cuda $(ARGS)

bench-host: runtime
	$(PY) -m benchmarks.host

bench-load: runtime
	$(PY) -m benchmarks.load

bench-sampler: runtime
	$(PY) -m benchmarks.sampler

# A revision or a folder to compare this tree with, as in: make bench-compare BASE=../other ARGS="--suite host,serve"
BASE = HEAD
bench-compare: runtime
	$(PY) -m benchmarks.compare $(BASE) . $(ARGS)

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

runtime dev:
	@command -v "$(PYTHON)" >/dev/null || { echo "exlm: no $(PYTHON) found; install Python 3.11 or newer" >&2; exit 1; }
	@"$(PYTHON)" scripts/bootstrap.py $@
