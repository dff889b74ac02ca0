"""Statistics of a record."""

import pytest

from finwhale.bench.record import percentile


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_a_percentile_is_the_nearest_rank(share: float, wanted: int) -> None:
    """Of 100 values the 99th is P99, not the largest."""
    assert percentile([float(i) for i in range(100, 0, -1)], share) == wanted


def test_a_percentile_of_one() -> None:
    assert [percentile([3.0], share) for share in (0.0, 0.5, 1.0)] == [3.0] * 3
