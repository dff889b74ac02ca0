"""Clients of other projects, unmodified, against a server with the embedded model."""

import subprocess
from pathlib import Path

import pytest

from . import environments
from .servers import DemoServer

SCRIPT = Path(__file__).parent / "ask.py"
CLIENTS = {
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # it imports mcp for any tool
    "langchain": ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "inspect_ai": ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"),
    "instructor": ("instructor==1.17.0",),
    "pydantic_ai": ("pydantic-ai-slim==2.68.0",),
    "openai_agents": ("openai-agents==0.24.0",),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client(client: str, demo_server: DemoServer, tmp_path: Path) -> None:
    programs = environments.make(tmp_path / "environment", *CLIENTS[client])
    command = [str(programs / "python"), str(SCRIPT), client, demo_server.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
