"""`serve` suggests data-parallel ranks to those whose options ask for many sequences."""

import pytest

from finwhale.config import EngineConfig
from finwhale.engine.start.decisions import data_parallel_advice


def test_many_sequences_on_several_ranks() -> None:
    advice = data_parallel_advice(EngineConfig(max_num_seqs=128), 4)
    assert "data_parallel_size=4 may" in advice and "\n" not in advice


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 2),  # the engine's own choice
        ({"max_num_seqs": 127}, 2),
        ({"max_num_seqs": 512}, 1),
        ({"max_num_seqs": 512, "data_parallel_size": 2}, 2),
        ({"max_num_seqs": 512, "kv_events": "5557"}, 2),  # which lanes refuse
        ({"max_num_seqs": 512, "whole_attention": True}, 2),
    ],
)
def test_nothing_to_suggest(options: dict[str, int | str], ranks: int) -> None:
    assert data_parallel_advice(EngineConfig(**options), ranks) == ""  # type: ignore[arg-type]
