"""Communication between the ranks of one model: contracts, references and implementations."""
