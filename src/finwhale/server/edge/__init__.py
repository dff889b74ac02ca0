"""Who may come in, and how much: connections, hosts, keys, shares, bodies."""
