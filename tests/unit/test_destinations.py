"""Destinations that are parts of a few tensors."""

import pytest
import torch

from finwhale.weights.destinations import Destinations


def test_destinations_are_views_of_the_tensors() -> None:
    whole, divided = torch.zeros(2, 3), torch.zeros(10, dtype=torch.int16)
    destinations = Destinations({"whole": whole})
    destinations.divide(["a", "none", "b"], divided, [6, 0, 14])
    assert {name: part.numel() for name, part in destinations.items()} == {
        "whole": 24,
        "a": 6,
        "none": 0,
        "b": 14,
    }
    for name in destinations:
        destinations[name].fill_(1 + list(destinations).index(name))
    assert whole.view(torch.uint8).eq(1).all()
    assert divided.view(torch.uint8).tolist() == [2] * 6 + [4] * 14
    assert [memory.nbytes for memory in destinations.memories] == [24, 20]


def test_without_some() -> None:
    destinations = Destinations({name: torch.zeros(1) for name in "abc"})
    left = destinations.without({"b", "d"})
    assert list(left) == ["a", "c"] and "b" not in left and "b" in destinations
    assert left["c"].data_ptr() == destinations["c"].data_ptr()


def test_no_names_need_no_memory() -> None:
    """Ranks share the memories, and an empty tensor has none that they could share."""
    destinations = Destinations()
    destinations.divide([], torch.zeros(0), [])
    assert not destinations.memories and not len(destinations)


def test_parts_that_are_not_all_of_the_tensor() -> None:
    with pytest.raises(AssertionError):
        Destinations().divide(["a", "b"], torch.zeros(4), [4, 8])
