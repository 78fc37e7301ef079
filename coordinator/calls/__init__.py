"""Call objects: one class per kind of public call. Planned first, then run by the rows of the request table.

A call object answers the guards (facts, worked out before), does the host steps, and names the device. Whatever can be
refused is refused while it is planned; a host step only writes down what was planned.
"""
