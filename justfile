# What developers run; CONTRIBUTING.md says when. `just setup` makes .venv, and every recipe prefers its programs.

export PATH := justfile_directory() / ".venv/bin" + ":" + env("PATH")

# List the recipes.
default:
    @just --list

# Create .venv with Finwhale, all development packages and the pre-commit hooks.
setup:
    python3 -m venv .venv
    pip install torch==2.13.0
    pip install -e '.[dev]'
    pre-commit install

# Linters, types, imports and unit tests: under two minutes, for every change.
quick:
    ruff check .
    ruff format --check .
    mypy
    lint-imports --no-logo
    pytest tests/unit

# Every test that needs no GPU, as CI runs them.
test *args:
    pytest {{ args }}

# Tests that take longer than CI's core job: about an hour in all.
long: long-schedules long-fuzz long-page long-soak

# Random schedules of the engine: about 20 minutes.
long-schedules:
    pytest tests/unit/test_scheduler.py tests/engine/test_prefix.py --hypothesis-profile long

# Requests generated from the server's OpenAPI description, and hostile grammars.
long-fuzz examples="200":
    FINWHALE_FUZZ_EXAMPLES={{ examples }} pytest -n0 tests/server/test_fuzz.py tests/server/test_hostile_grammars.py

# The server's page in a browser; fails without Chromium.
long-page:
    command -v chromium || command -v chromium-browser
    pytest -n0 tests/server/test_page.py

# Many clients of one server, some of them hostile. Needs a machine with nothing else to do.
long-soak seconds="600":
    python -m tests.server.soak --seconds {{ seconds }}

# Every test that needs an NVIDIA GPU.
gpu *args:
    pytest tests/gpu {{ args }}

# Measure: `just bench`, `just bench offline --config flash --layers 8 --dummy`.
bench what="cpu" *args:
    finwhale bench {{ what }} {{ args }}

# Build the documentation into build/site; a broken link fails.
docs:
    mkdocs build --strict

# Show the documentation at http://127.0.0.1:8001 while you write it.
docs-serve:
    mkdocs serve --dev-addr 127.0.0.1:8001

# Write the line counts of README's map of the source.
map:
    python tools/source_map.py

# Check and build a release into dist/; then tag and upload it by hand.
release:
    test -z "$(git status --porcelain)" || { echo "commit or stash your changes first"; exit 1; }
    grep -q "^## $(python -c 'import finwhale; print(finwhale.__version__)')$" CHANGELOG.md || { echo "CHANGELOG.md has no section for this version"; exit 1; }
    .ci/run
    rm -rf dist
    python -m build
    python -m zipfile --list dist/*.whl | grep -q finwhale/demo/model.safetensors
