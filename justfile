# Shortcuts; CONTRIBUTING.md says what each is for. Run them in an environment with the "dev" extra.

# List the recipes.
default:
    @just --list

# ruff, mypy, import-linter and the unit tests: under two minutes.
quick:
    ruff check .
    ruff format --check .
    mypy
    lint-imports --no-logo
    pytest tests/unit

# What needs no GPU: README's test command, and what .ci/run ends with.
test *args:
    pytest {{ args }}

# What needs an NVIDIA GPU, in one go.
gpu *args:
    pytest tests/gpu {{ args }}

# Random schedules for some twenty minutes.
long:
    pytest tests/unit/test_scheduler.py tests/engine/test_prefix.py --hypothesis-profile long
