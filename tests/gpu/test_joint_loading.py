"""Two ranks that write to each other's weights while they load, on one GPU or on two."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_sharded_loading import tensors
from tests.support.official_config import config_json

from finwhale.bench.load import Loader, Loaders
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.writer import write_stored
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights import joint_ranks
from finwhale.weights.dummy import DummySource

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[2]
CONFIG = replace(
    published("flash").without_draft_head().with_layers(4),
    vocab_size=1280,
    n_routed_experts=8,
)


class ComparingLoader(Loader):
    """Compares weights that the ranks load together with those that this rank loads alone."""

    def compare(self) -> None:
        joint, alone = self.loaded(self.ranks), self.loaded()
        for (path, one), (_, other) in zip(tensors(joint), tensors(alone), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), path
        del joint, alone, one, other
        self.check_freed()

    def refuse(self) -> None:
        """One rank cannot open the other's memory, so both read alone."""

        def refused(*args: Any) -> Any:
            raise FinwhaleError("no access")

        if self.rank.index:
            vars(joint_ranks)["open_buffer"] = refused
        self.compare()

    def fail(self) -> None:
        """One rank cannot read its file. Both fail, and tell the cause."""
        if self.rank.index:
            self.checkpoint = replace(self.checkpoint, path=self.checkpoint.path / "missing")
        try:
            self.loaded(self.ranks)
        except FinwhaleError as error:
            assert "No such file" in str(error), error
        else:
            raise AssertionError("no fault")
        self.check_freed()

    def check_freed(self) -> None:
        """No rank holds the memory of another one."""
        self.free()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated(self.device) < 2**20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joint")
    source = DummySource(weight_specs(CONFIG), "cuda", seed=3)
    write_stored(path, config_json(CONFIG), source, max_shard_bytes=200_000_000)
    assert len(Checkpoint.open(path).shards()) > 2
    return path


@pytest.mark.parametrize(
    "work", [ComparingLoader.compare, ComparingLoader.refuse, ComparingLoader.fail]
)
@pytest.mark.parametrize("gpus", (1, 2))
def test_two_ranks(
    monkeypatch: pytest.MonkeyPatch, files: Path, gpus: int, work: Callable[[Any], None]
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and torch sees {torch.cuda.device_count()}")
    monkeypatch.syspath_prepend(str(ROOT))  # the ranks import this module
    devices = ["cuda:0", f"cuda:{gpus - 1}"]
    new_loader = partial(ComparingLoader, files, CONFIG, devices)
    with closing(Loaders(new_loader, devices)) as loaders:
        loaders.run(work.__name__)
