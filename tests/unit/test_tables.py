"""Operator tables: complete by construction, on every platform, without its hardware."""

import dataclasses
import inspect
import logging
from dataclasses import replace
from itertools import count, product

import pytest

from finwhale.cli.main import main
from finwhale.errors import ResourceError
from finwhale.ops import Capabilities, Ops, load_ops, table_name
from finwhale.ops.table import NO_OPERATORS
from finwhale.platform import Platform

NUMBERS = count(1000)
NAMES = [field.name for field in dataclasses.fields(Ops) if field.name not in NO_OPERATORS]
PLATFORMS = [
    Platform.cpu(),
    *(Platform("nvidia", arch) for arch in ("sm80", "sm89", "sm90", "sm100", "sm120", "sm999")),
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
        tables.append(load_ops(platform, group=32))
    for ops, name in product(tables, NAMES):
        wanted, found = (
            inspect.signature(getattr(table, name)).parameters.values()
            for table in (reference, ops)
        )
        options = [p for p in found if p.kind == p.KEYWORD_ONLY]
        names = [[p.name for p in each if p.kind != p.KEYWORD_ONLY] for each in (found, wanted)]
        assert names[0] == names[1], name
        assert all(p.default is not p.empty for p in options), name


@pytest.mark.parametrize(
    "platform",
    [Platform("nvidia", "sm70"), Platform("amd", "gfx906"), Platform("cpu ", "cpu")],  # type: ignore[arg-type]
)
def test_an_unknown_platform_is_refused(platform: Platform) -> None:
    with pytest.raises(ResourceError, match=f"no operator table for {platform.vendor}") as error:
        load_ops(platform)
    assert "sm80" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cpu", "nvidia", "nvidia-sm100", "amd"])
def test_the_command_line_prints_each_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--platform", name]) == 0
    out = capsys.readouterr().out
    assert f"operators on {name.partition('-')[0]}" in out
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


def warnings(platform: Platform, caplog: pytest.LogCaptureFixture, reference: bool = False) -> str:
    """What choosing a platform's table logs, twice: its number of multiprocessors is a new one."""
    platform = replace(platform, num_multiprocessors=next(NUMBERS))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "finwhale.ops"):
        assert load_ops(platform, reference) is load_ops(platform, reference)
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "arch, name", [("sm90", "nvidia_sm90"), ("sm100", "nvidia"), ("sm103", "nvidia")]
)
def test_gpus_that_run_the_kernels(arch: str, name: str) -> None:
    platform = Platform("nvidia", arch)
    assert table_name(platform) == name
    slow = {name for name, where in load_ops(platform).implementations() if ".ref." in where}
    assert slow <= {"prepare_linear", "prepare_experts", "grouped_form"}


def test_one_warning_where_the_kernels_were_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    wanted = "the Triton kernels run on sm100 without having been tested or measured there"
    assert warnings(Platform("nvidia", "sm100"), caplog) == wanted


@pytest.mark.parametrize(
    "arch, reason",
    [("sm80", "E4M3"), ("sm89", "shared memory"), ("sm120", "shared memory"), ("sm999", "checked")],
)
def test_one_warning_where_the_references_run(
    arch: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    platform = Platform("nvidia", arch)
    assert load_ops(platform) is load_ops(Platform.cpu(), reference=True)
    (line,) = warnings(platform, caplog).splitlines()
    assert f"slow reference operators run on {arch}: " in line and reason in line


@pytest.mark.parametrize("platform", [Platform.cpu(), Platform("nvidia", "sm90")])
def test_no_warning_where_a_table_was_measured(
    platform: Platform, caplog: pytest.LogCaptureFixture
) -> None:
    assert "operators run" not in warnings(platform, caplog)
    assert warnings(Platform("nvidia", "sm80"), caplog, reference=True) == ""


def test_implementations_read_the_same_in_every_process() -> None:
    """Compiled layers are cached by this text, so it has no addresses."""
    tables = [load_ops(platform) for platform in PLATFORMS]
    tables.append(load_ops(Platform("nvidia", "sm90"), batch_invariant=True))
    for ops in tables:
        assert not [shown for _, shown in ops.implementations() if " at 0x" in shown]
    shown = dict(load_ops(Platform("nvidia", "sm90")).implementations())
    assert "few_tokens=few_tokens_hopper.launch" in shown["linear"]


def test_the_table_has_the_gpu_s_number_of_multiprocessors() -> None:
    """And shows it beside the other options of its operators, where it is not an H200's."""
    for arch in ("sm90", "sm100"):
        ops = load_ops(Platform("nvidia", arch, 114))
        shown = dict(ops.implementations())
        assert "num_multiprocessors=114" in shown["linear"]
        assert "num_multiprocessors=114" in shown["select_entries"]
    invariant = load_ops(Platform("nvidia", "sm90"), batch_invariant=True)
    shown = dict(invariant.implementations())
    wanted = "attention.sparse_attention_hopper.sparse_attention(invariant=True)"
    assert shown["sparse_attention"] == wanted


def test_groups_of_32_have_a_table_on_hopper_alone() -> None:
    pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
    own, of_128 = (load_ops(Platform("nvidia", "sm90"), group=group) for group in (32, 128))
    assert own.shared_entries is not None and of_128.shared_entries is None
    changed = {name for name, fn in own.implementations() if fn.startswith("deepseek_v41.")}
    assert {
        "linear",
        "grouped_linear",
        "swiglu_mlp",
        "sparse_attention",
        "finish_experts",
    } < changed
    for arch in ("sm100", "sm80"):
        table = load_ops(Platform("nvidia", arch), group=32)
        assert dict(table.implementations())["linear"] == "linear.ref.linear"
    with pytest.raises(ResourceError, match="batch_invariant"):
        load_ops(Platform("nvidia", "sm90"), batch_invariant=True, group=32)
