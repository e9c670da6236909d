# The workbook's commands: `make lab` to read it, `make test` to prove it; both set up .venv by themselves first.

PYTHON ?= python3
VENV   ?= .venv
LAB_ARGS ?=
NOTEBOOK ?= work/00_start_here.ipynb

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST    := .venv-oldest
HOSTED    := .venv-hosted
NEWEST    := build/newest
GPU_DAY   := build/gpu-day
SOURCES   := pyproject.toml constraints.txt tools/install.py
IN_HOSTED := PATH="$(abspath $(HOSTED))/bin:$$PATH" $(HOSTED)/bin/pytest
TO_HOSTED := --newest --extras "" --requirements tests/hosted.txt
STRICTLY  := --nbval --nbval-current-env --nbval-cell-timeout 300 --timeout 330

# In a terminal of JupyterLab, in `!torchrun` and in the tests, the tools of this environment come first.
INSIDE := PATH="$(abspath $(BIN)):$$PATH"
# Jobs mostly wait, so tests run side by side; what belongs together stays in one process.
ABREAST := -n 4 --dist loadgroup
VERSION := import sys; print(sys.version_info[:2])

.DEFAULT_GOAL := help
.PHONY: help install lab test check lint types units jobs nbval labs soak test-oldest test-hosted notebooks exercises record student gpu-kit gpu-day-dry constraints format clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## only set up .venv

lab: $(INSTALLED) ## open JupyterLab at your own copy of notebook 00 (LAB_ARGS="--no-browser --port 8890" is passed on)
	@$(BIN)/ddpkit start > /dev/null
	$(INSIDE) $(BIN)/jupyter lab $(NOTEBOOK) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

test: lint types jobs nbval ## everything: lint, types, unit and real-job tests, a real browser, every notebook

check: lint types units ## a minute: lint, types, unit tests

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

units: $(INSTALLED)
	$(INSIDE) $(BIN)/pytest -q $(ABREAST) -m "not job and not browser and not soak and not labs"

jobs: $(INSTALLED)
	$(INSIDE) $(BIN)/pytest $(ABREAST)

nbval: $(INSTALLED)
	$(INSIDE) $(BIN)/pytest -n 4 --dist loadfile $(STRICTLY) notebooks solutions

labs: $(INSTALLED) test-hosted ## every lab with every remedy, every walk and answer, as some 600 real jobs; and test-hosted
	$(INSIDE) $(BIN)/pytest $(ABREAST) -m "not soak" tests/test_labs.py
	$(INSIDE) $(BIN)/pytest $(ABREAST) -m labs tests/test_browser.py tests/test_browser_slurm.py tests/test_exercises.py

soak: $(INSTALLED) ## hundreds of launches, every fault at random moments
	@$(BIN)/python tools/install.py --requirements tests/libraries.txt
	$(INSIDE) $(BIN)/pytest -m soak

test-oldest: $(OLDEST)/.installed ## the tests with the oldest torch that is supported (its own environment, up to 5 GB)
	PATH="$(abspath $(OLDEST))/bin:$$PATH" $(OLDEST)/bin/pytest $(ABREAST) -m "not browser and not soak and not labs"

test-hosted: $(HOSTED)/.installed ## with what Colab and Kaggle bring: notebooks 00 and 02, and the live view in a real browser
	$(IN_HOSTED) -n 2 --dist loadfile $(STRICTLY) notebooks/00_*.ipynb notebooks/02_*.ipynb
	$(IN_HOSTED) -m "browser and not labs" tests/test_browser.py

notebooks: $(INSTALLED) ## run every notebook and solution, and store their outputs in place
	$(INSIDE) $(BIN)/python tools/store_outputs.py

exercises: $(INSTALLED) ## exercises/ afresh from solutions/, by nbgrader's ClearSolutions
	$(BIN)/python tools/make_exercises.py

record: $(INSTALLED) ## afresh, the recorded runs of the labs that need Linux
	$(BIN)/python tools/record_labs.py

student: $(INSTALLED) ## dist/ddp-workbook.zip: the workbook for students, without solutions and tests
	$(BIN)/python tools/student_archive.py

gpu-kit: $(INSTALLED) ## build/gpu-kit: what a machine with a GPU and no network lacks
	$(BIN)/python tools/gpu_kit.py

gpu-day-dry: $(INSTALLED) ## the day on one GPU, without a GPU: every step, and its recordings taken
	rm -rf $(GPU_DAY)
	$(INSIDE) $(BIN)/python tools/gpu_day.py $(GPU_DAY)/first --first --dry
	$(INSIDE) $(BIN)/python tools/gpu_day.py $(GPU_DAY)/rest --dry
	$(BIN)/python tools/take_gpu_day.py $(GPU_DAY)/first/gpu-day.zip $(GPU_DAY)/rest/gpu-day.zip --into $(GPU_DAY)/taken

constraints: $(INSTALLED) ## constraints.txt afresh, from the newest versions (TORCH=2.14.0 moves torch as well)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python tools/install.py --newest $(if $(TORCH),--torch $(TORCH))
	$(NEWEST)/bin/python tools/pin.py > $(NEWEST)/constraints.txt
	mv $(NEWEST)/constraints.txt constraints.txt
	rm -rf $(NEWEST)

format: $(INSTALLED) ## lay out the Python files, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environments and the caches; the runs in .ddpkit stay
	rm -rf $(VENV) $(OLDEST) $(HOSTED) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name .ddpkit -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

$(HOSTED)/.installed: tests/hosted.txt
$(VENV)/.installed $(OLDEST)/.installed $(HOSTED)/.installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || { echo \
	  'This workbook needs Python 3.11 to 3.14, and "$(PYTHON)" is something else or missing; name another: make $(MAKECMDGOALS) PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  'The Python "$(PYTHON)" cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@[ "$$($(@D)/bin/python -c '$(VERSION)' 2>/dev/null)" = "$$($(PYTHON) -c '$(VERSION)')" ] || $(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python tools/install.py $(if $(filter $(OLDEST)/%,$@),--torch oldest) $(if $(filter $(HOSTED)/%,$@),$(TO_HOSTED))
	@$(@D)/bin/python -m compileall -q -x 'catalog|tasks' ddpkit
	@touch $@
