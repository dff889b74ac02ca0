"""Without the extras, modules can be imported, and no command ends in a traceback."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from finwhale.cli.bench import BENCHMARKS
from finwhale.cli.main import COMMANDS
from finwhale.extras import EXTRAS

ROOT = Path(__file__).parents[2]
# Modules that implement an extra; without its packages, importing one names the extra.
NEED_EXTRAS = re.compile(
    r"finwhale\.(server(\..*)?|checkpoint\.hub|distributed\.ray_actors|engine\.loop\.kv_events|bench\.serving"
    r"|cli\.(serve|run_batch|pages)|ops\..*deepgemm.*)"
)
ARGUMENTS = {
    "generate": ["x", "--model", "somebody/model"],
    "chat": ["--model", "somebody/model"],
    "run-batch": ["in", "out"],
    "completion": ["bash"],
    "bench": ["serving", "--url", "http://127.0.0.1:9", "--model", "m"],
    "doctor": ["--no-run"],
}
PROBE = """
import contextlib, importlib, io, json, sys, traceback
from pathlib import Path
blocked, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(blocked))
import finwhale
from finwhale.cli.main import main
modules, ends = {}, {}
root = Path(finwhale.__file__).parents[1]
for file in sorted(root.glob("finwhale/**/*.py")):
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except BaseException as error:
        modules[name] = [type(error).__name__, str(error)]
for command in commands:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(command)
        except SystemExit as error:
            code = error.code
        except BaseException:
            code = traceback.format_exc()
    ends[" ".join(command)] = [code, err.getvalue()]
print(json.dumps([modules, ends]))
"""


def test_no_extra_is_needed() -> None:
    blocked = [name.partition(".")[0] for _, names in EXTRAS.values() for name in names]
    blocked += ["deep_gemm", "transformers", "lm_eval"]
    commands = [[name, "--help"] for name in COMMANDS]
    commands += [["bench", name, "--help"] for name in BENCHMARKS]
    commands += [[name, *ARGUMENTS[name]] for name in COMMANDS if name in ARGUMENTS]
    commands += [["serve"]]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([blocked, commands])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, ends = json.loads(done.stdout)
    for name, (kind, text) in modules.items():
        assert NEED_EXTRAS.fullmatch(name), (name, kind, text)
        assert kind == "ModuleNotFoundError", (name, kind, text)
        assert re.fullmatch(r".+ needs \w+: pip install 'finwhale\[\w+\]'", text), (name, text)
    assert {"finwhale.server.link.wire", "finwhale.bench.serving"} <= modules.keys()
    assert len(ends) == len(commands)
    for command, (code, err) in ends.items():
        assert code in (0, 1), f"{command}: {code}"
        assert "Traceback" not in err
        if code == 1 and command != "doctor --no-run":
            assert re.fullmatch(r"finwhale: error: .* needs .*\n", err), f"{command}: {err}"
            assert "pip install " in err
    failed = {command for command, (code, _) in ends.items() if code}
    assert {"serve", "run-batch in out", "completion bash"} <= failed
    assert {"generate x --model somebody/model", "bench serving --help"} <= failed


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, (_, modules) in EXTRAS.items():
        for requirement in project["optional-dependencies"][extra]:
            package = re.split(r"[^\w-]", requirement)[0].replace("-", "_")
            top = "opentelemetry" if package.startswith("opentelemetry") else package
            top = "zmq" if top == "pyzmq" else top
            assert top in {module.partition(".")[0] for module in modules}, requirement
