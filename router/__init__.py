"""The single public URL: finds each request's rank and passes it on, byte by byte.

::

    app        the handler of every request; start and stop
    affinity   which rank: from the key or id, or computed from the group's name (pure)
    health     which ranks serve now; waiting for one
    forward    a request to a rank, sent again while nothing was sent
    upstream   the shared client session, and what a failure means
    body       a client's body, bounded        reply    answers, which clients must take
    opens      `start_session`                 fanout   routes over all ranks
    leasing    acks, exports, leases           merge    several answers as one (pure)
    stats      what is counted                 metrics  `/metrics` of all parts

It keeps nothing that a restart would lose.
"""
