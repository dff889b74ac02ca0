"""Operator tables: complete by construction, on every platform, without its hardware."""

import dataclasses
import inspect
from itertools import product

import pytest

from finwhale.cli.main import main
from finwhale.errors import ResourceError
from finwhale.ops import Capabilities, Ops, load_ops
from finwhale.platform import Platform

NAMES = [field.name for field in dataclasses.fields(Ops) if field.name != "capabilities"]
PLATFORMS = [
    Platform.cpu(),
    *(Platform("nvidia", arch) for arch in ("sm80", "sm89", "sm90", "sm100", "sm120")),
    *(Platform("amd", arch) for arch in ("gfx942", "gfx950")),
]


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: p.arch)
def test_a_table_implements_every_operator(platform: Platform) -> None:
    ops = load_ops(platform)
    assert [operator for operator, _ in ops.implementations()] == NAMES
    for name in NAMES:
        assert callable(getattr(ops, name)), name
    assert isinstance(ops.capabilities, Capabilities)
    assert load_ops(platform) is ops


def test_operators_have_no_defaults() -> None:
    """So that a table which lacks one does not construct."""
    for field in dataclasses.fields(Ops):
        assert field.default is dataclasses.MISSING, field.name
        assert field.default_factory is dataclasses.MISSING, field.name
    ops = load_ops(Platform.cpu())
    chosen = {field.name: getattr(ops, field.name) for field in dataclasses.fields(Ops)}
    for name in chosen:
        with pytest.raises(TypeError, match=name):
            Ops(**{other: fn for other, fn in chosen.items() if other != name})
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = ops.rms_norm  # type: ignore[misc, assignment]


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: p.arch)
def test_implementations_take_the_reference_table_s_arguments(platform: Platform) -> None:
    """One contract an operator: the same parameters by position on every platform."""
    reference = load_ops(Platform.cpu())
    tables = [load_ops(platform)]
    if platform == Platform("nvidia", "sm90"):
        tables.append(load_ops(platform, batch_invariant=True))
    for ops, name in product(tables, NAMES):
        wanted = inspect.signature(getattr(reference, name)).parameters
        found = inspect.signature(getattr(ops, name)).parameters.values()
        options = [p for p in found if p.kind == p.KEYWORD_ONLY]
        assert [p.name for p in found if p not in options] == list(wanted), name
        assert all(p.default is not p.empty for p in options), name


@pytest.mark.parametrize(
    "platform",
    [Platform("nvidia", "sm70"), Platform("amd", "gfx906"), Platform("cpu ", "cpu")],  # type: ignore[arg-type]
)
def test_an_unknown_platform_is_refused(platform: Platform) -> None:
    with pytest.raises(ResourceError, match=f"no operator table for {platform.vendor}") as error:
        load_ops(platform)
    assert "sm80" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cpu", "nvidia", "amd"])
def test_the_command_line_prints_each_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--platform", name]) == 0
    out = capsys.readouterr().out
    assert f"operators on {name}" in out
    for operator in NAMES:
        assert f" {operator} " in out, operator


def test_the_machine_s_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    assert f"operators on {Platform.detect().vendor}" in capsys.readouterr().out


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: p.arch)
def test_batch_invariance_is_refused_where_nothing_promises_it(platform: Platform) -> None:
    with pytest.raises(ResourceError, match="batch_invariant needs"):
        load_ops(platform, reference=True, batch_invariant=True)
    if platform == Platform.cpu() or platform.arch == "sm90":
        load_ops(platform, batch_invariant=True)
    else:
        with pytest.raises(ResourceError, match="batch_invariant needs"):
            load_ops(platform, batch_invariant=True)
