"""The least bytes of decode steps, for `finwhale bench offline`."""

import pytest

from finwhale.bench.drafting import floors
from finwhale.bench.floors import DecodeBytes, PrefillOperations, expected_experts
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.registry import published_config

FLASH, DSPARK = published("flash"), published("flash-0731")
V41 = published_config("v4.1-flash")


def test_experts_of_few_and_of_many_tokens() -> None:
    assert expected_experts(FLASH, 1) == pytest.approx(6)
    assert 33 < expected_experts(FLASH, 6) < 36
    assert 255 < expected_experts(FLASH, 512) < 256


def test_ranks_read_the_model_s_experts_together() -> None:
    whole = DecodeBytes(FLASH, Rank(0, 1))
    parts = [DecodeBytes(FLASH, Rank(index, 4)) for index in range(4)]
    assert sum(part.expert for part in parts) == pytest.approx(whole.expert)
    # Every rank holds the weights that all heads share, such as the first projections.
    assert whole.others / 4 < parts[0].others < whole.others


def test_a_step_of_flash_on_two_gpus() -> None:
    """Its experts and other weights, and few rows: 1.43 ms, as in the project's tables."""
    found = floors(DecodeBytes(DSPARK, Rank(0, 2)), 1024, 1, 1.0)
    assert found["floor_ms"] == found["verification_floor_ms"] == pytest.approx(1.427, abs=1e-3)
    assert found["draft_floor_ms"] == 0


def test_attention_that_a_rank_holds_whole_is_not_read_whole() -> None:
    ranks = [Rank(0, 2, whole_attention=whole) for whole in (False, True)]
    part, whole = (DecodeBytes(FLASH, rank).others for rank in ranks)
    assert part == whole
    part, whole = (PrefillOperations(FLASH, rank).ms(8192) for rank in ranks)
    assert part == whole


def test_a_prompt_of_one_data_parallel_rank() -> None:
    """The rank computes all of attention, and its part of the experts."""
    ranks = Rank(0, 1), Rank(0, 2, data_parallel=True), Rank(0, 2)
    found = [PrefillOperations(FLASH, rank) for rank in ranks]
    one, lanes, two = (each.ms(8192) for each in found)
    assert two < lanes < one
    # Twice as many tokens do more than twice the work in attention alone.
    one, lanes, two = (each.ms(2**17) - 2 * each.ms(2**16) for each in found)
    assert two < lanes == pytest.approx(one)


def test_drafts() -> None:
    """Each draft of DSpark reads a part of the Markov head again; the MTP layer runs again."""
    dspark, mtp = DecodeBytes(DSPARK, Rank(0, 2)), DecodeBytes(FLASH, Rank(0, 2))
    assert dspark.drafts(5, 1) - dspark.drafts(4, 1) == 129280 / 2 * 256 * 2
    assert mtp.drafts(3, 1) == 3 * mtp.drafts(1, 1) > 3 * 129280 / 2 * 4096 * 2
    assert DecodeBytes(FLASH.without_draft_head(), Rank(0, 2)).drafts(1, 1) == 0
    found = floors(dspark, 1024, 1, 6.0)
    parts = found["verification_floor_ms"] + found["draft_floor_ms"]
    assert found["floor_ms"] == pytest.approx(parts) == pytest.approx(3.61, abs=0.01)
    four = floors(DecodeBytes(DSPARK, Rank(0, 4)), 1024, 1, 6.0)
    assert four["floor_ms"] == pytest.approx(1.96, abs=0.01)


def test_v41_flash() -> None:
    """A decode reads 13 GB for one token; its candidates bound what four indexers read."""
    bytes_read = DecodeBytes(V41, Rank(0, 1))
    assert bytes_read.step(0, 0, 6) == pytest.approx(13.0e9, rel=0.02)
    million, half = (bytes_read.step(tokens, 1, 6) for tokens in (2**20, 2**19))
    assert million - half == 2**19 * (1 + 3 / 2) * 68
    assert bytes_read.drafts(5, 1) - bytes_read.drafts(4, 1) == 129280 * 256 * 2
    # The last 20 layers compute only the last 128 tokens of a prompt.
    short, exact = (PrefillOperations(c, Rank(0, 4)) for c in (V41, V41.with_exact_prefill()))
    assert 1.8 < exact.ms(8192) / short.ms(8192) < 2.2
    assert exact.ms(128) == pytest.approx(short.ms(128), rel=0.02)
