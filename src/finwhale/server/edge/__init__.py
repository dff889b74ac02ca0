"""Who may come in, and how much: connections, hosts, sizes of bodies, shares."""
