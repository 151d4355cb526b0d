# The commands of the project. Each of them creates .venv when there is none, so Python >= 3.11 and make are all it takes.

# The interpreter that .venv is made with is the first of these that is new enough; `make PYTHON=/path/to/python3.12 venv`
# names another one.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11 python

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Tests run one process per core, so every process keeps to one thread, unless the environment says otherwise.
OMP_NUM_THREADS ?= 1
MKL_NUM_THREADS ?= $(OMP_NUM_THREADS)
OFFLINE := HF_HUB_OFFLINE=1
THREADS := OMP_NUM_THREADS=$(OMP_NUM_THREADS) MKL_NUM_THREADS=$(MKL_NUM_THREADS) OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
PYTEST := $(OFFLINE) $(THREADS) $(VENV_PYTHON) -m pytest -n auto --dist loadgroup

# The tests that compute, and the kernels that they run with a second time: those of an AVX2 machine, or without SVE on a CPU
# that is not x86-64. make KERNELS="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41" test-kernels chooses others.
COMPUTING := tests/models tests/generation tests/training tests/test_pipelines.py
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
KERNELS ?= $(if $(filter x86_64 amd64,$(shell uname -m)),$(AVX2),ATEN_CPU_CAPABILITY=default)

# What `make docs` describes: modules whose names are meant to be imported, and the paper's layers.
DOCUMENTED := hf_vanilla $(addprefix hf_vanilla., data data.tokenization generation hub metrics models.layers training visualization)

# Cases of each test of `make fuzz`.
CASES ?= 1000

# The marks of the tests of `make test-slow`.
SLOW ?= slow

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-bert demo-vit test test-kernels test-slow scoreboard test-versions fuzz soak check format options docs release benchmark benchmark-gpu

help:  ## List these commands.
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED)  ## Create .venv and install the package with all it needs.

demo: $(INSTALLED)  ## Train a small date translator from nothing, in minutes, and show what it learnt.
	$(OFFLINE) $(VENV_PYTHON) scripts/demo.py

demo-bert: $(INSTALLED)  ## Pre-train a tiny BERT on Python's documentation, in minutes, and let it fill masks.
	$(OFFLINE) $(VENV_PYTHON) scripts/demo_bert.py

demo-vit: $(INSTALLED)  ## Train a small ViT on handwritten digits, in minutes, and draw what it looks at.
	$(OFFLINE) $(VENV_PYTHON) scripts/demo_vit.py

test: $(INSTALLED)  ## Run the tests, on all cores, without a network.
	$(PYTEST)

test-kernels: $(INSTALLED)  ## Run the tests that compute again, with the kernels of an older CPU.
	$(KERNELS) $(PYTEST) $(COMPUTING)

test-slow: $(INSTALLED)  ## Run the tests that take longer than 20 seconds each; SLOW="slow and promise" takes some of them.
	$(PYTEST) -m "$(SLOW)"

scoreboard: $(INSTALLED)  ## Run the tests of what is promised, and write its tables; OPTIONS="-k disk" renews a part.
	$(OFFLINE) $(THREADS) $(VENV_PYTHON) tests/scoreboard.py -n auto --dist loadgroup $(OPTIONS)

test-versions: $(INSTALLED)  ## Run the core of the tests with the lowest and the newest versions that are allowed.
	$(OFFLINE) $(THREADS) $(VENV_PYTHON) tests/versions.py $(OPTIONS)

fuzz: $(INSTALLED)  ## Try thousands of random configs, inputs and options; CASES=20000 says how many of each kind.
	FUZZ_CASES=$(CASES) $(PYTEST) tests/models/test_fuzz.py

soak: $(INSTALLED)  ## Kill trainings, damage checkpoints and try hostile inputs, in an hour; OPTIONS="--kills 5" and others.
	$(OFFLINE) $(THREADS) $(VENV_PYTHON) scripts/benchmark/soak.py $(OPTIONS)

check: $(INSTALLED)  ## Lint, check the format, the types and the docstrings.
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m flake8 hf_vanilla hf_vanilla_cli scripts

format: $(INSTALLED)  ## Format the code and apply the safe fixes of the linter.
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

options: $(INSTALLED)  ## Write the table of options that --help reads, after a change of an option.
	$(OFFLINE) $(VENV_PYTHON) tests/command_line/regenerate_options.py

docs: $(INSTALLED)  ## Write the API reference into docs_output/ and check its links.
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(OFFLINE) $(VENV_PYTHON) -m pdoc --docformat google -o docs_output $(DOCUMENTED)
	$(VENV_PYTHON) tests/check_links.py docs_output

# The wheel is built from the sdist. Nothing is uploaded: `twine upload dist/*` does that.
release: $(INSTALLED)  ## Build sdist and wheel into dist/, check them, and run the demo of the wheel in a new environment.
	$(VENV_PYTHON) -m pip install --quiet -c constraints.txt -e ".[release]"
	rm -rf dist release_output
	$(VENV_PYTHON) -m build --no-isolation --outdir dist
	$(VENV_PYTHON) -m twine check --strict dist/*
	$(VENV_PYTHON) -m venv release_output
	release_output/bin/python -m pip install --quiet -c constraints.txt torch
	release_output/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[viz]"
	cd release_output && bin/hf-vanilla --version && $(OFFLINE) bin/hf-vanilla demo

# search_agreement.py and translation_types.py need a trained model, ngram_baseline.py KenLM, pretraining_choices.py
# documents, gpu.py a GPU; soak.py measures no speed.
NO_BENCHMARKS := measuring kernel_checks gpu search_agreement translation_types ngram_baseline pretraining_choices \
	soak faults
BENCHMARKS := $(filter-out $(NO_BENCHMARKS:%=scripts/benchmark/%.py),$(wildcard scripts/benchmark/*.py)) \
	"scripts/benchmark/bert_pretraining.py --size base --batch_size 16 --steps 3" \
	"scripts/benchmark/translation_decoding.py --num_beams 1 --sentences 300" \
	"scripts/benchmark/gpt_decoding.py --num_beams 1" \
	"scripts/benchmark/gpt_training.py --task pretraining"

benchmark: $(INSTALLED)  ## Measure speed in an hour, into benchmark_output/; OPTIONS=--quick only sees that it runs.
	@for script in $(BENCHMARKS); do \
		echo "$(VENV_PYTHON) $$script $(OPTIONS)"; $(OFFLINE) $(VENV_PYTHON) $$script $(OPTIONS) || exit 1; \
	done

benchmark-gpu: $(INSTALLED)  ## Measure speed on a GPU, ten minutes at a time; OPTIONS="--device cpu --quick" only sees that it runs.
	$(OFFLINE) $(VENV_PYTHON) scripts/benchmark/gpu.py $(OPTIONS)

# An environment that is already there is kept and brought up to date. torch goes first and alone: once a torch is
# installed that satisfies the constraints, pip does not choose another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 && exit; \
	for python in $(PYTHON); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && exec "$$python" -m venv $(VENV); \
	done; \
	echo "hf_vanilla needs Python 3.11 or newer and finds none among: $(PYTHON)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1
	$(VENV_PYTHON) -m pip install -c constraints.txt torch
	$(VENV_PYTHON) -m pip install -c constraints.txt -e ".[dev]"
	@touch $@
