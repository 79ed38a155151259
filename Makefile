# Every target sets up what it needs in .venv; a machine with Python 3.11+, make and git is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: venv demo test lint fuzz chaos bench proto sglang conformance clean help
help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fullhit needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,lab]'
	@touch $@

venv: $(STAMP)  ## create .venv with all extras

demo: $(STAMP)  ## play the published workload over mock encoders and print the table
	$(BIN)/fullhit demo $(ARGS)

test: $(STAMP)  ## unit, property and end-to-end tests (real NATS, real processes)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(STAMP)  ## damaged input for every parser, 20,000 cases each (make test has 100)
	$(BIN)/python -m pytest --hypothesis-profile=fuzz tests/fuzz $(ARGS)

chaos: $(STAMP)  ## one fault after the other under traffic, over real processes; prints what each cost (about five minutes)
	$(BIN)/python -m tests.chaos $(ARGS)

bench: $(STAMP)  ## one table: figure, budget, ratio
	$(BIN)/fullhit bench $(ARGS)

proto: $(STAMP)  ## generate the gRPC stubs in router/fullhit/rpc/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I fullhit/rpc/v1=proto/fullhit/v1 --python_out=router --pyi_out=router --grpc_python_out=router fullhit/rpc/v1/router.proto

sglang: $(STAMP)  ## end to end with unmodified SGLang on the CPU (builds and caches its own environment)
	$(BIN)/python -m tests.sglang $(ARGS)

conformance: $(STAMP)  ## real NVIDIA Dynamo publishers of three releases against the router (builds and caches its own)
	$(BIN)/python -m tests.conformance $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
