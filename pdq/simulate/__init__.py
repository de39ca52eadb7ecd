"""A fleet on a simulated clock: the real admission and scaling decisions, against pools of pretended workers.

``profile`` says how fast a worker is, ``traces`` what is asked of the fleet, ``fleet`` lets events happen, ``scalers``
are the policies under comparison, ``compare`` runs them on the same trace and judges what came out.
"""
