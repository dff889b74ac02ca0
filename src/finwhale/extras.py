"""The optional packages: which extra of finwhale installs them, and for what."""

EXTRAS = {
    "server": (
        "finwhale serve",
        (
            "fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "starlette", "pydantic",
            "h11", "python_multipart",
        ),
    ),
    "trace": ("OpenTelemetry traces", ("opentelemetry.sdk", "opentelemetry.exporter.otlp")),
    "hub": ("downloading checkpoints by name", ("huggingface_hub",)),
    "bench": ("finwhale bench serving", ("aiohttp",)),
    "completion": ("completion in shells", ("shtab",)),
    "ray": ("ranks on a Ray cluster", ("ray",)),
}  # fmt: skip


def advice(error: ModuleNotFoundError) -> str | None:
    """Which extra has a missing package, in one line; None: none has it."""
    package = (error.name or "").partition(".")[0]
    for extra, (purpose, modules) in EXTRAS.items():
        if package in {module.partition(".")[0] for module in modules}:
            return f"{purpose} needs {package}: pip install 'finwhale[{extra}]'"
    return None
