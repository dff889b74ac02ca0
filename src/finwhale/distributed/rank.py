"""The index of a process among the processes that share a model, and who has given it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from finwhale.errors import FinwhaleError

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size` ranks, counted from 0.

    Attributes:
        whole_attention: the rank holds the weights of all heads as well as those of its own, and
            uses them in steps that the ranks divide by tokens.
        data_parallel: each rank serves sequences of its own, with all weights but the experts'.
    """

    index: int
    size: int
    whole_attention: bool = False
    data_parallel: bool = False

    def rows_per_rank(self, num_rows: int) -> int:
        """Number of rows of a rank when the ranks divide `num_rows`. The last may have fewer."""
        return -(-num_rows // self.size)

    def rows(self, num_rows: int, index: int | None = None) -> slice:
        """The part of `num_rows` rows of rank `index`, by default of this rank."""
        count = self.rows_per_rank(num_rows)
        start = min((self.index if index is None else index) * count, num_rows)
        return slice(start, min(start + count, num_rows))

    def others(self) -> list[int]:
        """The other ranks of 2, 4 or 8, in an order in which ranks exchange in pairs."""
        return [self.index ^ i for i in range(1, self.size)]


ALONE = Rank(0, 1)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a store.

    Attributes:
        prefix: the prefix of all keys.
    """

    host: str
    port: int
    prefix: str = "finwhale"


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank and the store that torchrun has given this process.

    Attributes:
        local_index: index of this process among those of its host.
        serves_store: rank 0 serves the store; otherwise the launcher does.
    """

    rank: Rank
    local_index: int
    store: StoreAddress
    serves_store: bool

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Self | None:
        """The placement that torchrun's variables describe; None: this process is the only rank.

        Raises:
            FinwhaleError: a variable is not a number, or contradicts another.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        if not all(name in environment for name in (*names, "MASTER_ADDR")):
            return None
        try:
            index, size, local_index, port = (int(environment[name]) for name in names)
        except ValueError as error:
            raise FinwhaleError(f"{', '.join(names)} in the environment: {error}") from error
        if not 0 <= index < size:
            raise FinwhaleError(f"RANK {index} in the environment is not below WORLD_SIZE {size}")
        if size == 1:
            return None
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        one_host = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
        host = HOST if one_host else environment["MASTER_ADDR"]
        store = StoreAddress(host, port, f"finwhale/{attempt}")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(Rank(index, size), local_index, store, serves_store=not agent)
