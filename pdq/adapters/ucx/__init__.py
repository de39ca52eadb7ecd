"""KV bytes through UCX: over TCP between any two hosts, over RDMA where the hosts have it.

``transport`` is the port; ``source`` serves what is on offer, ``sink`` pulls it, ``link`` is one endpoint between the two,
``wire`` what they say to each other, ``context`` the one UCX context of the process and how it is set up.

Whoever can reach UCX's own ports is trusted by UCX itself: its TCP transport lets a peer name the addresses that it writes
to. The secret keeps one handoff's bytes from those who do not know it; the network has to keep strangers out. That is why
the default binds to loopback.
"""

from pdq.adapters.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
