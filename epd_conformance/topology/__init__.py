"""Topologies as data, and the processes that make them real: devices, ports, guard, warmed parent, stack."""
